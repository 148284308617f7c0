"""What the device keeps for each running reply, by its slot."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import SpecialIds
from mosstalk.ops.sampling import ModeIds, update_modes
from mosstalk.ops.sampling_parts import ENDED, TEXT, DrawState


@dataclass(frozen=True)
class Slots:
    """State of replies that a step changes without the host.

    ``seen`` of each channel (slots, V) bool: ids that its penalty counts. ``latest`` (slots, 2)
    int64: the row drawn last. ``mode`` (slots,) int8: TEXT, AUDIO or ENDED, what comes after
    that row. ``halts`` (n,) int64: text ids after which nothing can be drawn before the host has
    seen them: those that end a reply, and modality_pad, whose row depends on a put-off draw.
    """

    seen: tuple[Tensor, Tensor]
    latest: Tensor
    mode: Tensor
    halts: Tensor

    @classmethod
    def allocate(
        cls, config: LanguageModelConfig, ids: SpecialIds, slots: int, device: torch.device
    ) -> "Slots":
        """State of ``slots`` replies that have not begun."""
        text, audio = (
            torch.zeros((slots, size), dtype=torch.bool, device=device)
            for size in (config.vocab_size, config.audio_vocab_size)
        )
        halts = sorted({*ids.stop, ids.modality_pad})
        return cls(
            (text, audio),
            torch.zeros((slots, 2), dtype=torch.int64, device=device),
            torch.full((slots,), ENDED, dtype=torch.int8, device=device),
            torch.tensor(halts, device=device),
        )

    def settle(self, at: Tensor, channel: int, drawn: Tensor, bad: Tensor, ids: SpecialIds) -> None:
        """Note that ``drawn`` (R,) of ``channel`` completed the rows of slots ``at`` (R,).

        The slots are in that mode, and ``latest`` has what was drawn. A row of text has its
        audio draw put off: it gets audio_pad, and after sosp its slot is in AUDIO until that
        draw is made up and says otherwise. Where ``drawn`` is negative nothing was drawn and
        nothing changes, but that a ``bad`` one, (R, 2) by channel, has ended.
        """
        text = DrawState(self.seen[TEXT], self.latest, self.mode)
        whole = torch.where((drawn < 0) & ~bad[:, channel], -1, at)
        special = ModeIds(ids.sosp, ids.eosp, ids.modality_pad, ids.audio_pad)
        update_modes(text, whole, bad, self.halts, special, put_off=True)
