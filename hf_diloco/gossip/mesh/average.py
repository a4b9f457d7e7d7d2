"""The mean over all nodes of a mesh, or over the remaining ones.

Nodes average in a group, a `MeshExchange`. When a member is lost, the others form a new group of the nodes that are
present: each writes to the store that it is present, and which average it is at; the first node whose patience runs
out fixes the list of members that it sees. A vote follows each average, so that no node goes on while another must
repeat the average:

- A node whose vote succeeded knows that all others had the mean, as they vote only then.
- So if any node lacks the mean, no node has gone on: the new group repeats the average.
- If all have the mean, they keep it, and go on with the new group.
- A node that has gone on records this in the store, and does not join the group: the others then keep the mean too,
  and go on without a group. Otherwise a node that stops while it sends its votes would separate those that have its
  vote from those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch

from hf_diloco.codecs import CODECS
from hf_diloco.errors import ExchangeError, ForgedError, IslandLostError, PayloadError, UnsupportedError
from hf_diloco.gossip.mesh.edges import Endpoint
from hf_diloco.gossip.mesh.store import KEEPER, Board, lost_key
from hf_diloco.gossip.records import Record, whole_number
from hf_diloco.transport.base import Traffic
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.utils.text import name_all
from hf_diloco.utils.waiting import WaitNotes

MAX_ATTEMPTS = 5
"""Attempts of a node to form a group, for one average."""

SUSPECT_SECONDS = 2.0
"""How long nodes that form a group wait for a node that one of them has lost: perhaps only one link broke."""

_PURPOSE = "the average of all nodes"


class GroupAverage:
    """One node's part in averages over all nodes.

    A node that comes too late gets no mean. If nodes are in lockstep, it has lost its neighbours, and ends. Otherwise
    it comes to the next average like a restarted node. The others wait for it there only after its first, second,
    fourth, ... miss in a row, as a node that is always too slow would delay every average.

    Args:
        find_lost: returns the neighbours that this node has lost.
        is_new: whether this node was restarted, while others may have averaged before.
        notes: log for which nodes this node waits.

    Attributes:
        members: the nodes that took part in the last average.
        is_in_step: whether nodes are in lockstep.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        board: Board,
        num_nodes: int,
        find_lost: Callable[[], Collection[int]],
        is_new: bool,
        notes: WaitNotes,
    ) -> None:
        self._notes = notes
        self.members: tuple[int, ...] = ()
        self.is_in_step = True
        self._endpoint = endpoint
        self._board, self._clock = board, board.clock
        self._node = endpoint.node
        self._num_nodes = num_nodes
        self._timeout = endpoint.timeout
        self._find_lost = find_lost
        self._attempt = 0
        self._num_averages = 0
        self._num_attempts = 0  # in this average
        self._begun = self._exchange_begun = 0.0
        self._suspects: set[int] = set()
        self._num_returned_before = 0  # the count of returned nodes when the suspects became suspects
        self._num_returned = 0  # the count of returned nodes when the group was formed
        self._is_new = is_new
        self._num_missed = 0  # in a row
        self._group: MeshExchange | None = None
        self._group_members: tuple[int, ...] = ()
        self._buffer = self._values = torch.empty(0)

    @staticmethod
    def check(vector: torch.Tensor) -> None:
        """See `Neighbours.check_average`."""
        if vector.dtype != torch.float32:
            raise UnsupportedError(
                f"nodes in several processes average float32, not {str(vector.dtype).removeprefix('torch.')}: keep "
                "parameters in float32"
            )

    def average(self, vector: torch.Tensor) -> Traffic:
        """See `Neighbours.average`."""
        self.check(vector)
        self._num_averages += 1
        self._begun = self._clock.now()
        self._num_attempts = 0
        traffic, has_mean = Traffic(), False
        if len(self._group_members) < self._num_nodes and self._board.count("returned") != self._num_returned:
            self.close()  # to form a group that includes the returned nodes
        while True:
            if self._group is None:
                have_all = self._form_group(has_mean)
                if has_mean and have_all:
                    break
                has_mean = False
            try:
                traffic += self._transfer(vector)
                has_mean = True
                self._vote()
                self._board.put_later(f"averaged/{self._node}", {"average": self._num_averages})
                break
            except ExchangeError as error:
                self._give_up(error)
        vector.copy_(self._values)
        return traffic

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def _transfer(self, vector: torch.Tensor) -> Traffic:
        assert self._group is not None
        if self._buffer.numel() < vector.numel():
            self._buffer = torch.empty(vector.numel())
        self._values = self._buffer[: vector.numel()].copy_(vector)  # a failed exchange must not change `vector`
        self._exchange_begun = self._clock.now()
        traffic = self._group.average(self._values, [1.0] * len(self._group_members), CODECS["fp32"])
        self.members = self._group_members
        return traffic

    def _vote(self) -> None:
        assert self._group is not None
        self._group.average(torch.zeros(1), [1.0] * len(self._group_members), CODECS["fp32"])

    def _give_up(self, error: ExchangeError) -> None:
        """Leaves the group; marks nodes whose connection broke as suspects, for which the next group waits briefly."""
        is_late = self._clock.now() - self._exchange_begun >= self._timeout
        num_returned = self._board.count("returned")
        is_back = num_returned != self._num_returned
        if isinstance(error, IslandLostError) and not is_late and not is_back:
            self._num_returned_before = num_returned
            self._suspects.update(self._group_members[place] for place in error.islands)
        self.close()

    # Groups.

    def _form_group(self, has_mean: bool) -> bool:
        """Connects the nodes that are present as a new group, unless a node has gone on with the mean.

        Returns whether all members that are at the group's earliest average have its mean.
        """
        if self._is_new and not self._num_attempts:
            self._attempt = whole_number(self._board.read("attempt") or {"number": 0}, "number", KEEPER)
        while self._num_attempts < MAX_ATTEMPTS:
            self._num_attempts += 1
            self._attempt += 1
            self._num_returned = self._board.count("returned")
            record = {"average": self._num_averages, "is_new": self._is_new, "has_mean": has_mean}
            members = self._meet(record, has_mean)
            if not members:
                if has_mean:
                    return True
                self._num_attempts -= 1  # an attempt of others, for an average that this node has completed
                continue
            records = self._read_records(members)
            self._board.put("attempt", {"number": self._attempt})
            others = [member for member in members if member != self._node]
            watch = partial(self._notes.watch, self._timeout, _PURPOSE, others)
            lane = self._endpoint.lane(f"{self._board.name}/average{self._attempt}", members, self._timeout, watch())
            try:
                self._group = MeshExchange(lane, watch=watch)
            except (ExchangeError, ForgedError):
                continue
            self._group_members = members
            self._suspects.clear()
            self._num_missed = 0
            return self._compare(records)
        raise IslandLostError(
            f"the nodes could not form a group to average in {MAX_ATTEMPTS} attempts: check the links between their "
            "machines, then start all nodes again from their checkpoints"
        )

    def _compare(self, records: list[Record]) -> bool:
        known = [record for record in records if record.get("is_new") is False]
        first = min((record["average"] for record in known), default=max(record["average"] for record in records))
        behind = [record for record in known if record["average"] == first]
        have_all = all(record.get("has_mean") is True for record in behind)
        if self._is_new:
            self._num_averages, self._is_new = (first + 1 if have_all and behind else first), False
        if not have_all and len(behind) < len(known):
            raise ExchangeError("the nodes are not at the same average: start all nodes again from their checkpoints")
        return have_all

    def _meet(self, record: Record, has_mean: bool) -> tuple[int, ...]:
        """Writes that this node is present; returns the members of the next group, as one of them decides.

        The group is empty if all nodes have the mean, which is certain once one has gone on with it.
        """
        self._board.put(self._key(self._node), record)
        begun = self._clock.now()
        patience = max(self._timeout, 2 * self._timeout - (begun - self._begun))  # twice: they may wait for others too
        present, wait = {self._node}, self._notes.begin(patience, _PURPOSE)
        await_news = self._board.news()
        while (decided := self._board.read(self._key("group"))) is None:
            absent = set(range(self._num_nodes)) - present
            present.update(self._board.who_has({node: self._key(node) for node in absent}))
            absent -= present
            if has_mean and self._has_anyone_gone_on():
                self._board.put_first(self._key("group"), {"nodes": []})
                continue
            waited = self._clock.now() - begun
            if waited > patience or (waited > SUSPECT_SECONDS and absent <= self._find_suspects(absent)) or not absent:
                if present == {self._node}:
                    self._board.remove(self._key(self._node))  # or others would include this node in the attempt
                    raise self._nobody_came(absent)
                self._board.put_first(self._key("group"), {"nodes": sorted(present)})
            else:
                wait.look(absent)
                await_news()
        return self._check_members(decided)

    def _check_members(self, decided: Record) -> tuple[int, ...]:
        nodes = decided.get("nodes")
        if not isinstance(nodes, list) or not set(nodes) <= set(range(self._num_nodes)):
            raise PayloadError(
                f"the list of nodes that average is invalid ({decided}): give the rendezvous its own port"
            )
        members = tuple(sorted(nodes))
        others = set(range(self._num_nodes)) - {self._node}
        if members and self._node not in members:
            remedy = (
                "Start this node again, alone, by the same command, and it returns; with pmsgd, start all nodes again"
            )
            raise IslandLostError(
                f"{name_all(members, 'node')} average without this one, node {self._node}, which came too late. "
                f"{self._miss(remedy)}. If it is often late, raise exchange_timeout",
                members,
            )
        if others and members == (self._node,):
            raise self._nobody_came(others)
        return members

    def _nobody_came(self, others: Collection[int]) -> IslandLostError:
        return IslandLostError(
            f"{name_all(others, 'node')} did not join the average. "
            f"{self._miss('No other is left: start all nodes again from their checkpoints')}",
            others,
        )

    def _miss(self, remedy: str) -> str:
        """Records an average that this node missed. Returns the advice for its message: `remedy`, in lockstep."""
        if self.is_in_step:
            return remedy
        self._is_new = True
        self._num_missed += 1
        if self._num_missed.bit_count() == 1:
            self._board.count("returned", 1)
        return "This node goes on, and joins the next average"

    def _has_anyone_gone_on(self) -> bool:
        """Whether another node has received all votes of this average, and so has gone on."""
        others = (node for node in range(self._num_nodes) if node != self._node)
        records = self._board.read_all({node: f"averaged/{node}" for node in others})
        return any(record.get("average") == self._num_averages for record in records.values())

    def _find_suspects(self, absent: Collection[int]) -> set[int]:
        """The absent nodes that this node, or another one, has lost."""
        if self._suspects and self._board.count("returned") != self._num_returned_before:
            self._suspects.clear()  # a returned node may be one of them; neighbours of the others report their loss
        return {*self._suspects, *self._find_lost(), *self._board.who_has({node: lost_key(node) for node in absent})}

    def _read_records(self, members: Collection[int]) -> list[Record]:
        gone = {"average": self._num_averages, "is_new": True}
        shown = self._board.read_all({member: self._key(member) for member in members})
        records = {member: shown.get(member, gone) for member in members}
        for member, record in records.items():
            whole_number(record, "average", member)
        return list(records.values())

    def _key(self, what: int | str) -> str:
        return f"average{self._attempt}/{what}"
