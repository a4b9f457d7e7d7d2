"""How a node comes back while the others go on: its own side. `returning` has its neighbours', and what is said.

Here all take their steps together; `FreeEntry` is for nodes that do not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh.agreement import FIRST_MARGIN, MAX_ROUNDS, decide
from hf_diloco.gossip.mesh.average import lost_key
from hf_diloco.gossip.mesh.discovery import Discovery
from hf_diloco.gossip.mesh.edges import Edge
from hf_diloco.gossip.mesh.rejoin import LOOK_SECONDS, company_key, entry_prefix, greeting_key
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.gossip.mesh.straggler_timeout import StragglerTimeout
from hf_diloco.gossip.records import whole_number
from hf_diloco.transport.connections import PROBE_SECONDS
from hf_diloco.transport.transfers import Transfers
from hf_diloco.utils.waiting import Wait

T = TypeVar("T")


class Greetings:
    """Awaits the neighbours that see that this node is back.

    Args:
        discovery: how this node says that it waits for them.
        starts: how often each neighbour was started, as far as is known.
    """

    def __init__(self, discovery: Discovery, starts: Mapping[int, int]) -> None:
        self._board = discovery.board
        self._discovery = discovery
        self._node = discovery.node
        self._start = discovery.start
        self._starts = starts
        self._greeted: set[int] = set()
        self._waiting: set[int] = set()  # as this one does: they let nobody in

    def wait(self, patience: float, patience_with_others: float, wait: Wait) -> list[int]:
        """The neighbours that are there, to whom this node connects next: all, but for those that are lost or wait
        themselves.

        Who is left out, but goes on, connects again later.

        Args:
            patience: seconds to wait for the first.
            patience_with_others: seconds to wait for all others from then on.
            wait: says who is absent.
        """
        there = self._await(patience, patience_with_others, wait)
        self._board.put(company_key(self._node, self._start), {"nodes": there})
        return there

    def _await(self, patience: float, patience_with_others: float, wait: Wait) -> list[int]:
        begun, first_greeted, looked = time.monotonic(), math.inf, -math.inf
        await_news = self._board.news()
        while True:
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                looked = now
                self._discovery.announce(list(self._starts), is_in=False)
                self._hear()
            absent = self._absent()
            if self._greeted:
                first_greeted = min(first_greeted, now)
            is_over = now - begun > patience or now - first_greeted > patience_with_others
            may_end = now - begun > 4 * LOOK_SECONDS and self._greeted and all(map(self._is_away, absent))
            if not absent or is_over or may_end:
                return sorted(self._greeted)
            wait.look(absent)
            await_news()

    def _absent(self) -> list[int]:
        for peer in self._starts.keys() - self._greeted:
            if self._board.has(greeting_key(self._node, self._start, peer)):
                self._greeted.add(peer)
        return [peer for peer in self._starts if peer not in self._greeted]

    def _hear(self) -> None:
        for peer, start in self._starts.items():
            announcement = self._discovery.announcement_of(peer, start)
            if announcement is not None:
                (self._waiting.discard if announcement.is_in else self._waiting.add)(peer)

    def _is_away(self, peer: int) -> bool:
        """Whether it lets nobody in now. That this node itself lost it, before it was started again, says nothing."""
        lost = self._board.read(lost_key(peer), peer)
        return peer in self._waiting or (lost is not None and lost.get("by") != self._node)


class Entry:
    """Agrees with the neighbours on a step, and takes their mean.

    Args:
        board: the mesh's.
        node: this node.
        start: which of its starts this is.
        edges: to the neighbours that are there; whoever goes is taken out.
        straggler_timeout: how long it waits for those that do not come; it tells those who wait for this node.
        timeout: seconds that a step of the neighbours may take.
        lose: is told whom the node has lost, and why.
    """

    def __init__(
        self,
        board: Board,
        node: int,
        start: int,
        edges: dict[int, Edge],
        straggler_timeout: StragglerTimeout,
        timeout: float,
        lose: Callable[[int, str], None],
    ) -> None:
        self._board = board
        self._node = node
        self._start = start
        self._edges = edges
        self._straggler_timeout = straggler_timeout
        self._timeout = timeout
        self._lose = lose

    def take(self, x: torch.Tensor) -> int:
        """Overwrites `x`, in host memory, with the neighbours' mean at the step that is returned."""
        step = self._agree()
        self._await_step(step)
        total: torch.Tensor | None = None
        num_given = 0
        buffer = torch.empty_like(x)
        for peer in sorted(self._edges):
            if self._transfer(peer, lambda edge, transfers: edge.receive(buffer, transfers)):
                total = x.copy_(buffer) if total is None else total.add_(buffer)
                num_given += 1
        self._check_company()
        x.mul_(1.0 / num_given)
        self._board.remove(lost_key(self._node))
        self._board.count("returned", 1)  # before any neighbour goes on: the next average is with this node
        for peer in sorted(self._edges):
            self._transfer(peer, lambda edge, transfers: edge.send(torch.ones(1, dtype=torch.uint8), transfers))
        self._check_company()
        return step

    def _agree(self) -> int:
        """The step at which all neighbours will give their parameters."""
        margin = FIRST_MARGIN
        for number in range(1, MAX_ROUNDS + 1):
            steps = self._ask("at", "step")
            step = max(steps.values()) + margin
            self._board.put(self._key("proposal"), {"round": number, "step": step})
            answers = self._ask(str(number), "is_to_come")
            prefix = entry_prefix(self._node, self._start)
            if decide(self._board, prefix, number, self._node, is_on=all(answers.values())):
                return step
            margin *= 2
        raise IslandLostError(
            f"node {self._node} could not agree with its neighbours on a step at which to return: start it again"
        )

    def _ask(self, topic: str, field: str) -> dict[int, int]:
        """What neighbours say, as soon as all have; who does not within two exchanges' time is lost."""
        self._straggler_timeout.begin_other("returning", 2 * self._timeout)
        return self._await(lambda peer: self._hear(peer, topic, field))

    def _await_step(self, step: int) -> None:
        """Returns when all neighbours are at the step at which they give.

        Who is not there yet may be as late as in any exchange, as those who are wait for it; until the first is, each
        step may take two exchanges' time.
        """
        at: dict[int, int] = {}
        self._straggler_timeout.begin_other("returning", self._timeout)
        self._straggler_timeout.renew(2)

        def look(peer: int) -> int | None:
            now = self._hear(peer, "at", "step") or 0
            if now != at.get(peer):
                at[peer] = now
                self._straggler_timeout.renew(1 if max(at.values()) >= step else 2)
            return now if now >= step else None

        self._await(look)

    def _await(self, say: Callable[[int], T | None]) -> dict[int, T]:
        """What neighbours say, as soon as all have; who does not, or whose connection breaks, is lost."""
        said: dict[int, T] = {}
        looked, await_news = time.monotonic(), self._board.news()
        while missing := sorted(self._edges.keys() - said.keys()):
            said |= {peer: word for peer in missing if (word := say(peer)) is not None}
            if time.monotonic() - looked > PROBE_SECONDS:
                looked = time.monotonic()
                self._look_at([peer for peer in missing if peer not in said])
            await_news()
        self._check_company()
        return {peer: said[peer] for peer in self._edges}

    def _look_at(self, missing: list[int]) -> None:
        """Drops those that are gone, and the first of those that are missing if it is too late."""
        for peer in list(self._edges):
            try:
                self._edges[peer].check()
                if peer in missing[:1]:
                    self._straggler_timeout.watch(peer)()
            except IslandLostError:
                self._drop(peer)

    def _transfer(self, peer: int, begin: Callable[[Edge, Transfers], None]) -> bool:
        """Sends to a neighbour, or receives; returns whether it was there, or else it is lost."""
        edge = self._edges[peer]
        self._straggler_timeout.begin_other("returning", self._timeout)
        try:
            transfers = edge.begin()
            begin(edge, transfers)
            edge.wait(transfers, self._straggler_timeout.limit, self._straggler_timeout.watch(peer))
        except IslandLostError:
            self._drop(peer)
            return False
        return True

    def _drop(self, peer: int) -> None:
        """Loses a neighbour, as it is late or its connection broke."""
        self._edges.pop(peer).close()
        self._lose(peer, self._straggler_timeout.reason)
        self._straggler_timeout.renew()

    def _hear(self, peer: int, topic: str, field: str) -> int | None:
        """What a neighbour says on a topic, if it does."""
        record = self._board.read(self._key(f"{topic}/{peer}"), peer)
        return None if record is None else whole_number(record, field, peer)

    def _check_company(self) -> None:
        if not self._edges:
            raise IslandLostError(
                f"node {self._node} could not return, as none of its neighbours is there: start it again when they "
                "are, or start all nodes again from their checkpoints if none goes on"
            )

    def _key(self, what: str) -> str:
        return f"{entry_prefix(self._node, self._start)}/{what}"


class FreeEntry(Entry):
    """For nodes that each step at their own pace: takes what neighbours give, from one after the other.

    Each neighbour gives at the beginning of its own next step.

    `timeout` is how long a neighbour may take to get there. Who waits is this node: a neighbour sends when it has been
    asked, and is asked when this node is ready to receive.
    """

    def take(self, x: torch.Tensor) -> int:
        """Overwrites `x`, in host memory, with the mean of what neighbours gave; returns the largest of their steps.

        With a smaller one this node would come to averages over all nodes that they have already had.
        """
        total, received, step = torch.zeros_like(x), torch.empty_like(x), torch.empty(1, dtype=torch.int64)
        steps: list[int] = []
        for peer in sorted(self._edges):

            def ask(edge: Edge, transfers: Transfers) -> None:
                edge.receive(step, transfers)
                edge.receive(received, transfers)
                self._board.put(self._key(f"asks/{edge.peer}"), {})

            if self._transfer(peer, ask):
                steps.append(int(step))
                total.add_(received)
        self._check_company()
        torch.mul(total, 1.0 / len(steps), out=x)
        self._board.remove(lost_key(self._node))
        return max(steps)
