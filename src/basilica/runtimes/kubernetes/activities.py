"""The activities of a run's ranks, as their agents published them in its keyspace: parsed once each. Pure."""

from collections.abc import Collection, Mapping

from basilica.core.seen import AnswerState
from basilica.progress.published import PublishedActivity, parse
from basilica.rendezvous.names import ACTIVITY
from basilica.runtimes.kubernetes.wakes import ActivityTally
from basilica.runtimes.rules import ENDED_ATTEMPTS_SHOWN

RANK_DIGITS_MAX = 9


class Activities:
    """The last activity of each attempt. The keyspace has that of a rank's newest attempt; earlier ones are kept here
    for as long as their ends are shown.

    `fresh_steps`: the ranks whose steps the controller waits for.
    """

    def __init__(self) -> None:
        self.by_attempt: dict[tuple[int, int], PublishedActivity] = {}
        self.fresh_steps: frozenset[int] = frozenset()
        self._texts: dict[int, str] = {}
        self._attempts: dict[int, list[int]] = {}  # by rank: those that are kept, the first one first

    def take(self, key: str, text: str) -> bool:
        """Take in the value of a key; return whether the controller has to be woken for it."""
        name = key.removeprefix(f"{ACTIVITY}/")
        if not (name.isascii() and name.isdecimal()) or len(name) > RANK_DIGITS_MAX:
            return False
        rank = int(name)
        if text == self._texts.get(rank):
            return False
        found = parse(text)
        if found is None:  # lost with its keyspace, or no value of an agent: what was known stays true
            return False
        self._texts[rank] = text
        before = self.by_attempt.get((rank, found.attempt))
        self.by_attempt[rank, found.attempt] = found
        if before is None:
            self._keep(rank, found.attempt)
        if found.is_same_but_for_steps(before):
            return rank in self.fresh_steps and found != before
        return True

    def reload(self, values: Mapping[str, str]) -> None:
        """Take in all values of a keyspace that was read anew. Those that have not changed are not parsed again."""
        for key, text in values.items():
            if key.startswith(f"{ACTIVITY}/"):
                self.take(key, text)

    def tally(self, live: Collection[tuple[int, int]], notice: int) -> ActivityTally:
        """Count what these attempts do; `notice` is the number of the published notice, 0 for none."""
        if not self.by_attempt:
            return ActivityTally(notice=notice)
        found = [self.by_attempt[key] for key in live if key in self.by_attempt]
        answers = [each.activity.answer for each in found if each.activity.answer is not None]
        ours = [answer for answer in answers if answer.number == notice]
        agents = [each.activity.agent for each in found if each.activity.agent is not None]
        return ActivityTally(
            notice=notice,
            listening=len(answers),
            unready=len(answers) - sum(answer.state is AnswerState.READY for answer in ours),
            late=sum(answer.state is AnswerState.LATE for answer in ours),
            leaving=sum(each.leaving is not None for each in found),
            worker_failures=sum(exit.exit_code != 0 for agent in agents for exit in agent.exits),
        )

    def _keep(self, rank: int, attempt: int) -> None:
        """Keep the newest attempts of the rank: the live one, and as many as are shown after their end."""
        kept = self._attempts[rank] = sorted((*self._attempts.get(rank, ()), attempt))
        while len(kept) > ENDED_ATTEMPTS_SHOWN + 1:
            del self.by_attempt[rank, kept.pop(0)]
