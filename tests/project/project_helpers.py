"""What the tests of this folder share: a small KV cache, and the message of a rejected command."""

import pytest

SMALL = {
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 24,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}


def reject(capsys, main, *arguments):
    """Run a program that rejects its command line, and return its message."""
    with pytest.raises(SystemExit) as end:
        main(*arguments)
    assert end.value.code == 2
    return capsys.readouterr().err
