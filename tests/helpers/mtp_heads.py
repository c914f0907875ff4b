"""Random MTP heads, and a loop in plain torch that drafts with them."""

import copy

import torch
from conftest import make_drafts_free
from safetensors.torch import save_file

from nanovllm.features.speculation.proposers import MTPProposer


class Head(torch.nn.Module):
    """An MTP head for a model of transformers, made of copies of its layers."""

    def __init__(self, model):
        super().__init__()
        decoder = model.model
        layer = [layer for layer in decoder.layers if hasattr(layer, "self_attn")][-1]
        size = decoder.norm.weight.numel()
        self.pre_fc_norm_embedding = copy.deepcopy(decoder.norm)
        self.pre_fc_norm_hidden = copy.deepcopy(decoder.norm)
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList([copy.deepcopy(layer)])
        self.norm = copy.deepcopy(decoder.norm)

    def forward(self, decoder, ids, before):
        """Return hidden states [num_rows, length, size], for `before` of the same shape."""
        embedded = self.pre_fc_norm_embedding(decoder.embed_tokens(ids))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(before)], -1))
        length = ids.shape[1]
        cos_sin = decoder.rotary_emb(x, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        x = self.layers[0](x, attention_mask=mask, position_embeddings=cos_sin)
        return self.norm(x[0] if isinstance(x, tuple) else x)

    def save(self, directory):
        weights = {f"mtp.{name}": each.contiguous() for name, each in self.state_dict().items()}
        save_file(weights, directory / "mtp.safetensors")


def shift(hidden):
    """Put hidden states [num_rows, length, size] before the tokens that follow, zeros first."""
    return torch.nn.functional.pad(hidden, (0, 0, 1, 0))


class Drafter:
    """Drafts for one sequence, computing all of it anew for each token."""

    def __init__(self, model, head):
        self.model = model
        self.head = head

    @torch.inference_mode()
    def draft(self, token_ids, num_tokens):
        decoder = self.model.model
        ids = torch.tensor([token_ids])
        before = shift(decoder(ids[:, :-1]).last_hidden_state)
        drafted = []
        for _ in range(num_tokens):
            hidden = self.head(decoder, ids, before)
            newest = self.model.lm_head(hidden[:, -1:]).argmax(-1)
            drafted.append(newest.item())
            ids = torch.cat([ids, newest], 1)
            before = torch.cat([before, hidden[:, -1:]], 1)
        return drafted


def add_head(directory, model):
    """Give a checkpoint a random head. Return the head."""
    torch.manual_seed(1)
    head = Head(model)
    for parameter in head.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    head.save(directory)
    return head.eval()


def record_drafts(llm, answers=()):
    """Let an engine draft in each step. Return what its head proposes: (token_ids, draft).

    A draft for one of the `answers` is then replaced by what follows, except for its last token.
    """
    drafts = make_drafts_free(llm)
    assert isinstance(drafts.proposer, MTPProposer)
    propose = drafts.proposer.propose
    proposals = []

    def propose_and_record(seqs, num_tokens):
        result = propose(seqs, num_tokens)
        replaced = []
        for seq, draft in zip(seqs, result, strict=True):
            proposals.append((list(seq.token_ids), draft))
            start = len(seq.token_ids)
            for answer in answers:
                if answer[:start] == seq.token_ids:
                    draft = answer[start : start + len(draft) - 1] + draft[-1:]
            replaced.append(draft)
        return replaced

    drafts.proposer.propose = propose_and_record
    return proposals
