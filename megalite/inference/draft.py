"""Continuing texts by two tokens at a time, of which multi-token prediction drafts the second (speculative decoding).

A pass reads the latest token of a text and a draft of the one after it. The model then draws both next tokens as it
would without drafts (Leviathan et al. 2023, arXiv 2211.17192): the second one counts if the first is the draft. So the
texts are the same, but for roundings of a pass of two tokens.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megalite.inference.engine import Pass
from megalite.inference.generate import Steps, Text


class DraftedSteps(Steps):
    """Passes of two tokens. One pass of the first layer of multi-token prediction follows each, for the next drafts.

    The layer keeps keys and values of its own, of positions whose next token is known. After a wrong draft they are
    overwritten, like the model's.
    """

    tried = 2  # the latest token, and the draft

    def read(self, new: Sequence[Text], first: int) -> list[list[int]]:
        texts = [text.request for text in new]
        slots, lengths = range(first, first + len(new)), [len(each.tokens) + each.most - 1 for each in texts]
        made = self.engine.prompts_pass([each.tokens for each in texts], self.cache, slots, lengths)
        ends = [end - 1 for end in accumulate(len(each.tokens) for each in texts)]
        tokens = self.drawn(made.logits(ends), [text.key(0) for text in new])
        following = [
            token for each, drawn in zip(texts, tokens, strict=True) for token in (*list(each.tokens)[1:], drawn)
        ]
        self._draft(new, made, following, ends)
        return [[token] for token in tokens]

    def next(self, active: Sequence[Text]) -> list[list[int]]:
        tried = [token for text in active for token in (text.new[-1], text.draft)]
        made = self.engine.next_pass(tried, [text.at for text in active], self.cache, self.tried)
        keys = [text.key(number) for text in active for number in range(self.tried)]
        tokens = self.drawn(made.logits(), keys)
        right = [tokens[row] == tried[row + 1] for row in range(0, len(tried), self.tried)]
        self._draft(active, made, tokens, [self.tried * number + each for number, each in enumerate(right)])
        return [tokens[self.tried * number :][: 1 + each] for number, each in enumerate(right)]

    def _draft(self, texts: Sequence[Text], made: Pass, following: Sequence[int], rows: Sequence[int]) -> None:
        """Draft the token after the next of each text. following: the next token of every row of the pass. rows: of
        each text, that of its latest known token."""

        def likeliest(logits: Tensor) -> Tensor:
            return logits[:, : self.vocabulary].argmax(-1)

        logits = made.further(following, rows)
        drafts = self.engine.agree(len(rows), likeliest, logits, torch.int64).tolist()
        for text, draft in zip(texts, drafts, strict=True):
            text.draft = draft
