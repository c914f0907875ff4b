"""Structured outputs: every text that ends fits its grammar, and the usual promises hold.

A random model that continues with any token finds what a grammar lets through.
"""

import json
import re
import shutil
import subprocess
import sys
from unittest.mock import patch

import jsonschema
import numpy as np
import pytest
import torch
from conftest import (
    check_invariants,
    copy_tokenizer,
    find_feature,
    generate_ids,
    make_checkpoint,
    make_drafts_free,
)

from nanovllm import DEMO_MODEL, LLM, SamplingParams, StructuredOutputsParams
from nanovllm.engine.request import Request
from nanovllm.features.structured_outputs import grammars
from nanovllm.features.structured_outputs import masks as structured

SHORT = {"type": "string", "maxLength": 8}
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": SHORT},
    "required": ["a"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS = [
    {"type": "integer", "minimum": -5, "maximum": 99},
    {"type": ["number", "null"]},
    {"type": "string", "pattern": "^[a-c]+x$", "maxLength": 20},
    {"type": "string", "format": "date-time"},
    {"enum": ["é", "日本", '"quoted"', "back\\slash", "line\nbreak", "😀", None, {"four": [5]}]},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": 1}], "items": False},
    {"type": "array", "items": PAIR, "maxItems": 2},
    {**PAIR, "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"^k[0-9]$": SHORT}, "additionalProperties": False},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    {"allOf": [PAIR, {"required": ["b"]}]},
    TREE,
]
REGEX = "[a-c]{2,4}-[0-9]+x"
GRAMMAR = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'
MIXED = [
    {"json": PAIR},
    {"json": json.dumps(TREE)},
    {"json_object": True},
    {"regex": REGEX},
    {"choice": ["yes", "no", "yes and no"]},
    {"grammar": GRAMMAR},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model with the tokenizer of the demo model, and with more logits than tokens.

    Two ids end a text: that of the tokenizer, and 400. Two are above the vocabulary, as in
    checkpoints with a reduced vocabulary, and are ignored.
    """
    directory = tmp_path_factory.mktemp("structured")
    eos_token_id = [400, 805, 9000]
    make_checkpoint(directory, vocab_size=805, initializer_range=0.1, eos_token_id=eos_token_id)
    copy_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def make(checkpoint):
    def make(model=checkpoint, **options):
        return LLM(model, **{"num_kvcache_blocks": 200, "kvcache_block_size": 4, **options})

    return make


@pytest.fixture(scope="module")
def llm(make):
    return make()


def run(llm, structured_outputs, prompt="a b", **params):
    """One output."""
    params = {"max_tokens": 200, "seed": 1, **params}
    sampling = SamplingParams(structured_outputs=structured_outputs, **params)
    return llm.generate(prompt, sampling)[0]


def mixed_batch(**params):
    """Prompts and params of constrained requests beside ordinary ones."""
    prompts, batch = [], []
    for i, kind in enumerate([*MIXED, None, None]):
        prompts.append([5 + i] * (3 + 4 * i))
        batch.append(SamplingParams(max_tokens=60, seed=i, structured_outputs=kind, **params))
    return prompts, batch


@pytest.fixture(scope="module")
def expected(llm):
    """The tokens of each request of the mixed batch alone."""
    return [generate_ids(llm, [prompt], params)[0] for prompt, params in zip(*mixed_batch())]


# --- What a text is


@pytest.mark.parametrize("model", ["random", "demo"])
def test_json_validates(make, monkeypatch, model):
    """At temperature 1, in small chunks, with preemptions."""
    options = {"model": DEMO_MODEL} if model == "demo" else {}
    llm = make(num_kvcache_blocks=40, max_num_batched_tokens=24, max_num_seqs=16, **options)
    monkeypatch.setattr(grammars, "check_in_process", lambda _: None)  # saves its time
    params = [
        SamplingParams(
            max_tokens=120, structured_outputs=StructuredOutputsParams(json=schema), seed=i
        )
        for i, schema in enumerate(SCHEMAS * 2)
    ]
    outputs = llm.generate(["a b"] * len(params), params)
    num_ended = 0
    for schema, output in zip(SCHEMAS * 2, outputs):
        assert output["finish_reason"] in ("stop", "length"), schema
        if output["finish_reason"] == "stop":
            jsonschema.validate(json.loads(output["text"]), schema)
            num_ended += 1
    assert num_ended > len(SCHEMAS)
    assert llm.stats["num_preemptions"] > 0
    check_invariants(llm)


@pytest.mark.parametrize("regex", [r"(.|\n)*", r"12 \+ 30 = [0-9]+\."])
def test_a_constraint_that_the_text_meets_changes_no_token(make, regex):
    llm = make(model=DEMO_MODEL)
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    free, constrained = [
        llm.chat(chat, SamplingParams(temperature=0.0, structured_outputs=each), use_tqdm=False)[0]
        for each in (None, {"regex": regex})
    ]
    assert constrained["text"] == free["text"]
    assert constrained["token_ids"] == free["token_ids"][: len(constrained["token_ids"])]


def test_regex_choice_and_grammar(llm):
    choice = ["", "red", 'a "b"', "line\nbreak", "é日😀"]
    settings = {"n": 8, "seed": 1, "max_tokens": 200}
    kinds = [{"regex": REGEX}, {"choice": choice}, {"grammar": GRAMMAR}]
    params = [SamplingParams(structured_outputs=kind, **settings) for kind in kinds]
    outputs = llm.generate(["a b"] * 3, params)
    assert {output["finish_reason"] for output in outputs} == {"stop"}
    texts = [output["text"] for output in outputs]
    assert all(re.fullmatch(REGEX, text) for text in texts[:8])
    assert {*texts[8:16]} <= {*choice} and len({*texts[8:16]}) > 1
    for text in texts[16:]:
        depth = text.count("(")
        assert re.fullmatch(rf"\({{{depth}}}\d{{1,3}}\){{{depth}}}", text)
    many = [f"{number} x" for number in range(9999)]
    output = run(llm, {"choice": many})
    assert output["text"] in many and output["finish_reason"] == "stop"


def test_end_of_the_grammar_ends_the_text_without_eos(llm):
    output = run(llm, {"regex": "ab"}, ignore_eos=True, min_tokens=50)
    assert (output["text"], output["finish_reason"]) == ("ab", "stop")
    assert not llm.eos_token_ids & {*output["token_ids"]}


def test_eos_comes_only_where_the_text_may_end(llm):
    assert llm.eos_token_ids == {llm.tokenizer.eos_token_id, 400}
    for eos in llm.eos_token_ids:
        bias = {eos: 100.0}
        output = run(llm, {"regex": "[ab]{3}[QZ]*"}, logit_bias=bias, ignore_eos=True)
        assert re.fullmatch("[ab]{3}", output["text"])
        assert output["token_ids"][-1] == eos
        assert output["finish_reason"] == "stop"
        output = run(llm, {"regex": "[ab]{3}[QZ]*"}, logit_bias=bias, min_tokens=10)
        assert re.fullmatch("[ab]{3}[QZ]+", output["text"])
        assert len(output["token_ids"]) == 11
        assert run(llm, {"regex": ""}, logit_bias=bias, min_tokens=2)["token_ids"] == [eos]


def test_added_tokens_are_text_unless_they_are_special(make):
    llm = make()
    llm.tokenizer.add_tokens(["<tag>"])
    token = len(llm.tokenizer) - 1
    output = run(llm, {"choice": ["<tag>"]}, logit_bias={token: 100})
    assert output["token_ids"] == [token]
    output = run(llm, {"choice": ["<|im_end|>."]}, logit_bias=dict.fromkeys(llm.eos_token_ids, 100))
    assert output["text"] == "<|im_end|>."
    assert not llm.eos_token_ids & {*output["token_ids"]}


def test_stop_token_that_alone_may_come_before_min_tokens(llm):
    (token,) = llm.tokenizer.encode("q", add_special_tokens=False)
    output = run(llm, {"regex": "q[xyz]"}, stop_token_ids=[token], min_tokens=2)
    assert output["token_ids"] == [token]


def test_filters_and_penalties_leave_a_token(llm):
    settings = {"top_k": 1, "top_p": 1e-9, "min_p": 1.0, "repetition_penalty": 1e6}
    settings |= {"presence_penalty": 2.0, "logit_bias": {i: -100.0 for i in range(700)}}
    for temperature in (0.0, 1.0):
        output = run(llm, {"regex": "[ab]{30}"}, temperature=temperature, **settings)
        assert re.fullmatch("[ab]{30}", output["text"])


# --- The same tokens, whatever the engine does


def test_samples_of_a_batch(llm, expected):
    prompts, params = mixed_batch()
    assert generate_ids(llm, prompts, params) == expected
    prompts, params = mixed_batch(n=2)
    ids = generate_ids(llm, prompts, params)
    assert ids[::2] == expected
    assert ids[1::2] != expected


@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 40, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 5},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_steps(make, expected, options):
    with make(**options) as llm:
        assert generate_ids(llm, *mixed_batch()) == expected
        check_invariants(llm)
        if "num_kvcache_blocks" in options:
            assert llm.stats["num_preemptions"] > 0


def test_drafts_are_verified_with_the_grammar(make):
    """Drafts propose what the prompt repeats. The grammar allows a part of it."""
    prompt = "the cat the cat the cat"
    kind = {"regex": "( the cat){6}[.!]"}
    alone = make()
    drafting = make(num_speculative_tokens=4)
    make_drafts_free(drafting)
    for seed in range(4):
        output = run(drafting, kind, prompt, seed=seed)
        assert output["token_ids"] == run(alone, kind, prompt, seed=seed)["token_ids"]
        assert re.fullmatch(kind["regex"], output["text"])
    assert 0 < drafting.stats["num_accepted_tokens"] < drafting.stats["num_draft_tokens"]


# --- Hostile and invalid grammars

DEEP_DICT: dict = {}
for _ in range(5000):
    DEEP_DICT = {"items": DEEP_DICT}
ENDLESS = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(10, 40))
HOSTILE = {
    "deep dict": {"json": DEEP_DICT},
    "deep rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000))},
    "deep regex": {"regex": "(" * 20000 + "a" + ")" * 20000},
    "references in a circle": {"json": {"$ref": "#"}},
    "nested repetition": {"regex": "((a{1,100}){1,100}){1,1000000}"},
    "ambiguity": {"grammar": 'start: s\ns: s s s | s s | "a" | '},
    "letters": {"regex": r"(\p{L}{1,500}\p{N}?){1,200}"},
}


def test_what_a_compilation_exceeds_is_named(llm):
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(1000))
    with pytest.raises(ValueError, match=r"structured_outputs: too complex .*\(exit code -11"):
        run(llm, {"grammar": f'start: r0\n{rules}\nr1000: "a"'})
    with pytest.raises(ValueError, match="more than 2 seconds of CPU time.*: simplify it"):
        run(llm, {"grammar": ENDLESS})
    assert not llm.requests


@pytest.mark.parametrize("token", ["<|im_end|>", "<|tool|>"])
def test_a_grammar_of_special_tokens_is_rejected(llm, token):
    """The tokens of the check have the second name, and those of the model the first."""
    with pytest.raises(ValueError, match="structured_outputs: .* unknown special token"):
        run(llm, {"grammar": f"start: {token}"})
    assert not llm.requests


def test_a_grammar_is_checked_once(llm, monkeypatch):
    run(llm, {"regex": "a" * 10**5}, max_tokens=1)
    assert sum(map(len, grammars.checked)) < 10**5
    for _ in range(2):
        with pytest.raises(ValueError, match="Invalid type: foo"):
            run(llm, {"json": {"type": "foo"}})
        monkeypatch.setattr(subprocess, "run", None)
    run(llm, {"regex": "a" * 10**5}, max_tokens=1)


def test_matchers_of_the_newest_grammars_are_kept(llm, monkeypatch):
    feature = find_feature(llm, grammars.StructuredOutputs)
    feature.matchers.clear()
    compiled = []
    compile = feature._compile
    monkeypatch.setattr(feature, "_compile", lambda text: compiled.append(text) or compile(text))
    monkeypatch.setattr(grammars, "MAX_MATCHERS", 2)
    for letter in "xyxxzyxzxy":
        run(llm, {"regex": f"{letter}+"}, max_tokens=1)
    assert len(feature.matchers) == 2
    assert [text.partition("(?:")[2][0] for text in compiled] == list("xyzyxzy")


def test_modules_beside_the_check_hide_no_others(tmp_path, monkeypatch):
    check = shutil.copy(grammars.CHECK_PROGRAM, tmp_path)
    (tmp_path / "resource.py").write_text("1 / 0")
    (tmp_path / "llguidance.py").write_text("1 / 0")
    monkeypatch.setattr(grammars, "CHECK_PROGRAM", check)
    grammars.check_in_process("start: /hidden/")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore:request:RuntimeWarning")
def test_hostile_grammar_costs_its_own_request(llm, expected, name):
    """The engine rejects it, or the request ends, and another request gets its tokens."""
    prompts, params = mixed_batch()
    hostile = SamplingParams(max_tokens=80, seed=1, structured_outputs=HOSTILE[name])
    try:
        outputs = llm.generate([prompts[3], "a"], [params[3], hostile])
    except ValueError as error:
        assert str(error).startswith("structured_outputs: ")
    else:
        assert outputs[0]["token_ids"] == expected[3]
        assert outputs[1]["finish_reason"] in ("stop", "length", "error")
    assert not llm.requests


def test_exceeded_limits_end_the_request_with_an_error(llm, expected):
    prompts, params = mixed_batch()
    hostile = SamplingParams(max_tokens=200, seed=1, structured_outputs=HOSTILE["letters"])
    problem = "llguidance ends its structured_outputs: lexer error: too many expressions"
    with pytest.warns(RuntimeWarning, match=problem):
        outputs = llm.generate([prompts[3], "a"], [params[3], hostile])
    assert outputs[0]["token_ids"] == expected[3]
    assert outputs[1]["finish_reason"] == "error"
    assert outputs[1]["error"].startswith(problem)
    assert outputs[0]["error"] is None
    assert 0 not in outputs[1]["token_ids"], "an empty mask samples nothing"


def make_object(num_properties):
    return {"type": "object", "properties": {f"p{i}": {} for i in range(num_properties)}}


def test_large_objects_do_not_exceed_limits(llm):
    assert run(llm, {"json": make_object(500)}, max_tokens=9)["finish_reason"] == "length"


def test_without_eos_no_token_ends_a_text(llm):
    feature = grammars.StructuredOutputs()
    feature.tokenizer = llm.tokenizer
    feature.vocab_size = llm.vocab_size
    feature.eos_token_ids = frozenset()
    fields = feature.prepare(SamplingParams(structured_outputs={"regex": "a*"}), 1)
    mask = structured.compute_mask(fields["constraint"].matcher)
    allowed = structured.list_tokens(mask)
    assert llm.vocab_size in allowed
    texts = [llm.vocabulary.read_bytes(token_id) for token_id in allowed[:-1]]
    assert texts
    assert all(set(text) == {ord("a")} for text in texts)


def test_a_row_without_an_allowed_token_becomes_nan(monkeypatch):
    """Only the last row, the second one of its sequence, is that. The others allow two tokens.

    A mask has whole bytes, so it can allow a token behind the vocabulary.
    """
    monkeypatch.setattr(
        structured.GrammarConstraint,
        "compute_masks",
        lambda self, seq, num_rows: [np.array([bits], np.uint8) for bits in [3, 16][:num_rows]],
    )
    requests = [object.__new__(Request) for _ in range(4)]
    free, first, also_free, second = requests
    for request in requests:
        request.constraint = None
    for request in (first, second):
        request.constraint = object.__new__(structured.GrammarConstraint)
    given = torch.tensor([[torch.inf, 1.0, torch.inf, 1.0]]).repeat(6, 1)
    rows = [free, first, also_free, also_free, second, second]
    logits = structured.apply_grammars(rows, given)
    assert logits[1].tolist() == logits[4].tolist() == [torch.inf, 1.0, -torch.inf, -torch.inf]
    assert logits[5].isnan().all()
    assert torch.equal(logits[[0, 2, 3]], given[:3]), "the others have no grammar"
    assert not (given < 0).any(), "log probabilities need them later"
    excluded = torch.tensor([[-torch.inf, -torch.inf, 1.0, 1.0]])  # by a logits processor
    assert structured.apply_grammars([first], excluded).isnan().all()


def test_token_that_the_grammar_forbids_is_an_error(llm, monkeypatch):
    monkeypatch.setattr(grammars, "apply_grammars", lambda rows, logits: logits)
    with pytest.warns(RuntimeWarning, match="structured_outputs: .* doesn't satisfy the grammar"):
        assert run(llm, {"regex": "q{200}"})["finish_reason"] == "error"


@pytest.mark.parametrize(
    "kind",
    [
        {"json": {"type": "foo", "title": 10**5 * "x"}},
        {"json": {"type": "string", "minLength": 3, "maxLength": 2}},
        {"json": {**PAIR, "maxProperties": 1}},  # not supported
        {"json": {"enum": [float("nan")]}},
        {"regex": r"[^\s\S]"},
        {"regex": "\ud800"},
    ],
    ids=ascii,
)
def test_invalid_grammar_is_rejected(llm, kind):
    with pytest.raises(ValueError, match="structured_outputs: ") as caught:
        run(llm, kind)
    assert len(str(caught.value)) < 400
    assert "start:" not in str(caught.value), "no line of a grammar is shown"
    assert not llm.requests


def test_an_error_that_no_text_matches_is_a_sentence(llm):
    with pytest.raises(ValueError, match=r"^structured_outputs: no text matches$"):
        run(llm, {"regex": r"[^\s\S]"})


def test_missing_package_and_missing_tokenizer(tiny, make, llm, monkeypatch):
    with pytest.raises(ValueError, match="structured_outputs: the checkpoint has no tokenizer"):
        run(make(tiny[0]), {"choice": ["a"]}, [1])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'nanovllm[structured]'")):
        run(llm, {"choice": ["a"]})


@pytest.mark.parametrize(
    "value, complaint",
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, not"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"json_object": False}, "exactly one of"),
        ({"choice": []}, "exactly one of"),
        ({"choice": [1]}, "choice must be a str"),
        ({"choice": "a"}, "choice must be a list"),
        ({"json": 3}, "json must be"),
        ({"regexp": "a"}, "'regexp': valid options are json, json_object, regex, choice, grammar"),
    ],
)
def test_invalid_parameters_are_named(value, complaint):
    with pytest.raises((ValueError, TypeError), match=complaint):
        SamplingParams(structured_outputs=value)


def test_prepared_prompts_are_not_compiled_again(llm, monkeypatch):
    """add_request of a prepared prompt runs between two steps and must be fast."""
    params = SamplingParams(structured_outputs={"choice": ["one", "two"]})
    feature = find_feature(llm, grammars.StructuredOutputs)
    with patch.object(feature, "_compile", side_effect=feature._compile) as compile:
        prepared = llm.prepare_prompts(["a"] * 3, params)
        assert llm.prepare_prompts([], params) == []
    assert compile.call_count == 1, "prompts share a grammar"
    monkeypatch.setattr(grammars, "make_grammar", None)
    for each in prepared * 2:
        llm.add_prepared(each)
    while not llm.is_finished():
        for output in llm.step():
            assert output["finish_reason"] in (None, "stop")


def test_no_request_fails_for_the_lexer_states_of_others(llm, monkeypatch):
    """Each text takes about 90 states of the lexer, and each request may take 100."""
    monkeypatch.setattr(grammars, "MAX_LEXER_STATES", 100)
    kind = {"regex": "a[xy]{60}|b[uv]{60}|c[mn]{60}"}
    outputs = [run(llm, kind, logit_bias=bias(llm, text)) for text in "abc"]
    assert [output["text"][0] for output in outputs] == ["a", "b", "c"]
    assert {output["finish_reason"] for output in outputs} == {"stop"}
    params = SamplingParams(n=6, max_tokens=200, structured_outputs=kind, seed=1)
    samples = llm.generate("a b", params)
    assert len({output["text"][0] for output in samples}) > 1
    assert {output["finish_reason"] for output in samples} == {"stop"}


def bias(llm, text):
    return {token: 100.0 for token in llm.tokenizer.encode(text, add_special_tokens=False)}


# --- logit_bias


def test_logit_bias_is_added_before_sampling(llm):
    wanted = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    ids = generate_ids(llm, [[1, 2]], SamplingParams(logit_bias={7: 100}, **wanted))
    assert ids == [[7] * 5]
    [plain] = generate_ids(llm, [[1, 2]], SamplingParams(**wanted))
    [banned] = generate_ids(llm, [[1, 2]], SamplingParams(logit_bias={plain[0]: -100}, **wanted))
    assert plain[0] not in banned
    with pytest.raises(ValueError, match="logit_bias must be at least 0 and at most 804"):
        generate_ids(llm, [[1]], SamplingParams(logit_bias={805: 1}))
