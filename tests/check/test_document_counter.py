"""The document counter: documents that straddle chunks, far from where one begins."""

import numpy as np

import tokenloader as tl
from tokenloader.check.document_counter import DocumentCounter
from tokenloader.check.documents import join
from tokenloader.tokens.reader import Reader


def test_a_document_past_2_32_tokens_has_its_length(tmp_path):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(2**32 + 100)
    with Reader(tl.open_tokens(tmp_path / "sparse.bin", dtype="uint8")) as reader:
        counter = DocumentCounter(reader, gap_tokens=1)
        counter.append(np.array([2**32 + 52]), join([]))
        counter.finish(2**32 + 100)
    assert (counter.num_documents, counter.longest_length) == (2, 2**32 + 52)
    assert counter.lengths[32:] == [1]
