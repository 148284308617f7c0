"""How many replies, and how much heard sound, a GPU keeps memory for at so many sessions.

Of many sessions few speak, or are answered, at the same moment, so there is less than one reply
and one turn for each. What finds no memory waits until another has ended.
"""

_ALL_ANSWERED = 64
"""Sessions of which each may be answered at the same time; of those beyond, every other one."""
_ALL_HEARD = 32
"""Sessions of which each may speak for a whole segment at the same time."""
SEGMENT_S = 31.0
"""A segment of 30 s, the most that is held of a turn, in whole pages of 1.28 s."""
_FURTHER_S = 8.0
"""What each session beyond them adds."""


def replies_at_once(sessions: int) -> int:
    """How many replies may be on their way to sound where there are so many sessions."""
    further = max(0, sessions - _ALL_ANSWERED)
    return sessions - further // 2


def heard_s(sessions: int) -> float:
    """Seconds of sound that may be held of turns under way, all of them together."""
    further = max(0, sessions - _ALL_HEARD)
    return (sessions - further) * SEGMENT_S + further * _FURTHER_S
