"""The conversation as its client sees it: every item in order, those included that only it sees.

A session knows the items that the model reads. The client may have put others between them, such
as results of functions, and items that were dropped for want of room are still there for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mosstalk.server.realtime.server_objects import Item
from mosstalk.session.commands import ROOT


@dataclass(eq=False)
class ListedItem:
    """An item of the protocol; ``read``: the session has it, so the model reads it."""

    item: Item
    read: bool = True

    @property
    def item_id(self) -> str:
        """Its id."""
        return self.item.id


class ItemList:
    """Items in the client's order; of those that are not read the latest ``kept_chars``."""

    def __init__(self, kept_chars: int) -> None:
        self._listed: list[ListedItem] = []
        self._by_id: dict[str, ListedItem] = {}
        self._unread: dict[str, int] = {}
        """Sizes of those that are not read, the latest last."""
        self._most_chars, self._kept_chars = kept_chars, 0

    def __iter__(self) -> Iterator[ListedItem]:
        return iter(self._listed)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._by_id

    @property
    def last_id(self) -> str | None:
        """Id of the last item."""
        return self._listed[-1].item_id if self._listed else None

    def find(self, item_id: str) -> ListedItem | None:
        """The item of that id."""
        return self._by_id.get(item_id)

    def before(self, item_id: str) -> str | None:
        """Id of the item before that one; None if it is the first, or not there."""
        listed = self.find(item_id)
        place = self._place(listed) if listed else 0
        return self._listed[place - 1].item_id if place else None

    def add(self, item: Item, after: str | None = None, *, read: bool = True) -> None:
        """Put an item after another one, at the end without one, or first after ``ROOT``."""
        place, previous = len(self._listed), self.find(after or "")
        if after == ROOT:
            place = 0
        elif previous:
            place = self._place(previous) + 1
        listed = ListedItem(item, read)
        self._listed.insert(place, listed)
        self._by_id[listed.item_id] = listed
        if not read:
            self._keep(listed)

    def remove(self, item_id: str) -> None:
        """Take an item out, if it is there."""
        listed = self._by_id.pop(item_id, None)
        if listed:
            self._listed.remove(listed)
            self._kept_chars -= self._unread.pop(item_id, 0)

    def forget(self, item_id: str) -> None:
        """The model reads this item no more."""
        listed = self.find(item_id)
        if listed and listed.read:
            listed.read = False
            self._keep(listed)

    def read_before(self, item_id: str) -> str:
        """Id of the last item up to this one that the session has; ``ROOT`` if there is none."""
        listed = self.find(item_id)
        place = self._place(listed) if listed else len(self._listed) - 1
        while place >= 0 and not self._listed[place].read:
            place -= 1
        return self._listed[place].item_id if place >= 0 else ROOT

    def _place(self, listed: ListedItem) -> int:
        """Where an item stands; at once for the last one, which is nearly always asked for."""
        last = len(self._listed) - 1
        return last if self._listed[last] is listed else self._listed.index(listed)

    def _keep(self, listed: ListedItem) -> None:
        """Make room for an item that is not read: those that have not been for longest go."""
        size = self._unread[listed.item_id] = len(repr(listed.item))
        self._kept_chars += size
        while self._kept_chars > self._most_chars and len(self._unread) > 1:
            self.remove(next(iter(self._unread)))
