"""The conversation as its client sees it: every item in order, those included that only it sees.

A session knows the items that the model reads. The client may have put others between them, such
as results of functions, and items that were dropped for want of room are still there for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mosstalk.session.commands import ROOT


@dataclass
class Listed:
    """An item of the protocol; ``read``: the session has it, so the model reads it."""

    item: dict[str, Any]
    read: bool = True

    @property
    def item_id(self) -> str:
        """Its id."""
        return str(self.item["id"])


class Ledger:
    """Items in the client's order; of those that are not read the latest ``kept_chars``."""

    def __init__(self, kept_chars: int) -> None:
        self._listed: list[Listed] = []
        self._most_chars, self._kept_chars = kept_chars, 0

    def __iter__(self) -> Iterator[Listed]:
        return iter(self._listed)

    def __contains__(self, item_id: str) -> bool:
        return self.find(item_id) is not None

    @property
    def last_id(self) -> str | None:
        """Id of the last item."""
        return self._listed[-1].item_id if self._listed else None

    def find(self, item_id: str) -> Listed | None:
        """The item of that id."""
        return next((each for each in self._listed if each.item_id == item_id), None)

    def before(self, item_id: str) -> str | None:
        """Id of the item before that one; None if it is the first, or not there."""
        ids = [each.item_id for each in self._listed]
        place = ids.index(item_id) if item_id in ids else 0
        return ids[place - 1] if place else None

    def add(self, item: dict[str, Any], after: str | None = None, *, read: bool = True) -> None:
        """Put an item after another one, at the end without one, or first after ``ROOT``."""
        place = len(self._listed)
        if after == ROOT:
            place = 0
        elif after is not None and after in self:
            place = [each.item_id for each in self._listed].index(after) + 1
        self._listed.insert(place, Listed(item, read))
        if not read:
            self._keep(item)

    def remove(self, item_id: str) -> None:
        """Take an item out, if it is there."""
        listed = self.find(item_id)
        if listed:
            self._listed.remove(listed)
            if not listed.read:
                self._kept_chars -= _chars(listed.item)

    def forget(self, item_id: str) -> None:
        """The model reads this item no more."""
        listed = self.find(item_id)
        if listed and listed.read:
            listed.read = False
            self._keep(listed.item)

    def read_before(self, item_id: str) -> str:
        """Id of the last item up to this one that the session has; ``ROOT`` if there is none."""
        found = ROOT
        for each in self._listed:
            found = each.item_id if each.read else found
            if each.item_id == item_id:
                break
        return found

    def _keep(self, item: dict[str, Any]) -> None:
        """Make room for an item that is not read."""
        self._kept_chars += _chars(item)
        unread = [each.item_id for each in self._listed if not each.read]
        for item_id in unread[:-1]:
            if self._kept_chars <= self._most_chars:
                break
            self.remove(item_id)


def _chars(item: dict[str, Any]) -> int:
    return len(repr(item))
