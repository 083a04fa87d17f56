"""Delimiters: the id that stands between documents, and whether it ends the one before or begins the next.

The ids of special tokens are those of the tokenizers' own files (`eos_token_id` and `bos_token_id` of their
models' generation_config.json, or the special tokens of tiktoken's encodings).
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokenloader.check.samples import file_bounds
from tokenloader.formats import llm_c
from tokenloader.tokens.token_array import TokenArray

Side = Literal["before", "after"]  # of the document that a delimiter belongs to

# Ids that can hardly be a common token of another tokenizer: GPT-2, one past it (a wrong id that is met),
# cl100k and OLMo 2, Llama 3, Qwen, o200k, Llama 4. Others (0 in Pythia) are for the caller to say.
KNOWN_EOS_IDS = (50256, 50257, 100257, 128001, 151643, 199999, 200001)
# The begin-of-text ids of tokenizers that have one, and their end-of-text ids: Llama 3, Llama 4. The other
# tokenizers have one id for both.
KNOWN_BOS_IDS = {128000: 128001, 200000: 200001}
KNOWN_IDS = (*KNOWN_EOS_IDS, *KNOWN_BOS_IDS)
# (begin, end) of tokenizers that number them so low that only both together are known: Llama 2 and Mistral;
# Gemma.
_LOW_PAIRS = ((1, 2), (2, 1))
_PAIRED = 0.9  # of both ids; in ids of other tokenizers hardly any are


def find_delimiter(ids: NDArray[Any]) -> int | None:
    """Finds the id between documents in a sample; None if none that is known is there.

    Of documents with both a begin-of-text and an end-of-text id, this is the latter.
    """
    for begin, end in _LOW_PAIRS:
        begins, ends = ids == begin, ids == end
        pairs = np.count_nonzero(ends[:-1] & begins[1:])
        most = max(np.count_nonzero(begins), np.count_nonzero(ends))
        if begins[0] and pairs > 1 and pairs >= _PAIRED * most:
            return end
    counts = {one: np.count_nonzero(ids == one) for one in KNOWN_IDS}
    likely = max(counts, key=counts.__getitem__)
    end = KNOWN_BOS_IDS.get(likely, likely)
    return (end if 2 * counts[end] >= counts[likely] else likely) if counts[likely] else None


def find_side(tokens: TokenArray, delimiter: int) -> Side | None:
    """Tells where a delimiter stands, by the ends of the files; else by what it is; None: not to be told.

    In the middle of a file nothing tells: between two documents it looks the same. A file whose writer puts
    it before each document begins with it, and one whose writer puts it after each ends with it, unless
    the writer cuts documents to fill its files. Most files count.
    """
    bounds = file_bounds(tokens)
    before = np.count_nonzero(tokens.gather(bounds[:-1], 1) == delimiter)
    after = np.count_nonzero(tokens.gather(bounds[1:] - 1, 1) == delimiter)
    if before != after:
        return "before" if before > after else "after"
    if delimiter in KNOWN_BOS_IDS.values():
        return "after"
    is_llm_c = {extent.format for extent in tokens.extents} == {llm_c.FORMAT}
    return "before" if delimiter in KNOWN_BOS_IDS or is_llm_c else None
