"""Number of draft tokens that is worth their time: the rule of `--speculate auto`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import accumulate
from operator import mul

from scheduling.drafts import Drafts
from scheduling.inference import Inference
from scheduling.past import Past

MOST = 8  # draft tokens of a row
KEPT = 0.98  # weight of an iteration's outcome when the next is over: what failed is tried again
GAIN = 1.03  # in tokens a second below which nothing is verified: estimates are no better
PRIOR = 0.5  # chance of acceptance before anything is known
OTHERS = 8  # tries that all requests' experience counts for, beside a request's own
RENEWED = 8  # iterations that an estimate serves at most: to estimate takes time of its own
# of a curve: weight of a new sample, and of one in the mean delay; the most that a sample counts of
# its usual time; samples after which that is forgotten; share of it that tokens never seen cost
NEW, DELAY, LATE, FORGOTTEN, UNSEEN = 0.2, 0.02, 1.5, 200, 0.25
# of a trial: iterations of a stretch, weight of earlier ones when one begins, share of time to lose
STRETCH, EARLIER, LOST = 16, 0.9, 0.02

Shares = list[tuple[Inference, int]]  # a number of tokens for each


class Curve:
    """Time by number of tokens, which need not lie on a line: a CPU's kernels work in tiles. It has
    the usual time of late samples for each number up to 15, and then for eight steps an octave,
    with straight lines between them. The mean delay is added to all, since occasional delays do not
    depend on the tokens. Fewer tokens take no longer than more.
    """

    def __init__(self) -> None:
        self._samples, self._delay_s = 0, 0.0
        self._usual: dict[int, tuple[float, int]] = {}  # seconds, and the number of its last sample
        self._known: list[int] = []  # steps with a usual time, ascending
        self._seconds: list[float] = []  # of each
        self._beyond: dict[int, list[tuple[int, float]]] = {}  # by rows; until the next renewal

    def add(self, n: int, seconds: float) -> None:
        step = last_of_step(n)
        usual, _ = self._usual.get(step, (seconds, 0))
        self._delay_s += (seconds - usual - self._delay_s) * DELAY
        self._usual[step] = usual + (min(seconds, LATE * usual) - usual) * NEW, self._samples
        if is_due(self._samples):
            self._renew()
        self._samples += 1

    def _renew(self) -> None:
        old, late = self._samples - FORGOTTEN, max(self._delay_s, 0.0)
        self._usual = {step: kept for step, kept in self._usual.items() if kept[1] > old}
        self._known = sorted(self._usual)
        times = [self._usual[step][0] + late for step in reversed(self._known)]
        self._seconds = list(accumulate(times, min))[::-1]
        self._beyond = {}

    def __bool__(self) -> bool:
        return self._samples > 0

    def at(self, n: int) -> float:
        """Return the time of n tokens. There must be a sample.

        More tokens than were seen are taken to cost a quarter of what those seen did, each, so that
        they are tried.
        """
        known, seconds = self._known, self._seconds
        i = bisect_left(known, n)
        if i == len(known):
            return seconds[-1] * (1 + UNSEEN * (n / known[-1] - 1))
        if i == 0 or known[i] == n:
            return seconds[i]
        share = (n - known[i - 1]) / (known[i] - known[i - 1])
        return seconds[i - 1] * (1 - share) + seconds[i] * share

    def beyond(self, rows: int) -> list[tuple[int, float]]:
        """Return pairs of draft tokens, up to the most of so many rows, at the end of each step;
        and the time of an iteration with them.
        """
        if rows not in self._beyond:
            pairs, n = [(0, self.at(rows))], rows
            while n < (1 + MOST) * rows:
                n = last_of_step(n + 1)
                pairs.append((n - rows, self.at(n)))
            self._beyond[rows] = pairs
        return self._beyond[rows]


def is_due(n: int) -> bool:
    """Return whether the n-th iteration renews an estimate; the first ones often do."""
    return n % min(RENEWED, 1 + n // RENEWED) == 0


def last_of_step(n: int) -> int:
    """Return the last of the numbers that a `Curve` takes together."""
    width = 1 << max(0, n.bit_length() - 4)
    return -(-n // width) * width


class Trial:
    """Tokens a second with drafts and without, each measured over stretches of iterations, since
    nothing else shows what proposing and deciding cost. The slower way is tried for a stretch now
    and then, as often as that loses no more than a share of all time.
    """

    def __init__(self) -> None:
        self.on = False
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]  # without, with
        self._left = 0  # iterations of this stretch, and what it had
        self._got, self._spent_s = 0, 0.0
        self._wait_s = 0.0  # until the next stretch of what seems worse

    def add(self, tokens: int, seconds: float, is_typical: bool) -> None:
        if is_typical:
            self._tokens[self.on] += tokens
            self._seconds[self.on] += seconds
        self._got, self._spent_s = self._got + tokens, self._spent_s + seconds
        self._wait_s -= seconds

    def next(self) -> bool:
        """Return whether the next iteration has drafts."""
        if not self._left:
            better = self._rate(True) >= self._rate(False)
            if self.on != better:
                self._wait_s = (self._spent_s - self._got / self._rate(better)) / LOST
                self.on = better
            elif self._wait_s <= 0:
                self.on = not better
            self._tokens[self.on] *= EARLIER
            self._seconds[self.on] *= EARLIER
            self._left, self._got, self._spent_s = STRETCH, 0, 0.0
        self._left -= 1
        return self.on

    def _rate(self, on: bool) -> float:
        return self._tokens[on] / self._seconds[on] if self._seconds[on] else float("inf")


class Acceptance:
    """Rates at which draft tokens were accepted, by their place in a row."""

    def __init__(self) -> None:
        # tries: verified after those before it were accepted
        self._hits, self._tries = [0.0] * MOST, [0.0] * MOST
        self.chances = [PRIOR] * MOST  # that follow from them

    def add(self, n: int, accepted: int) -> None:
        """Count a row's outcome: so many of n draft tokens were accepted."""
        for place in range(min(accepted + 1, n, MOST)):  # the first rejection is the last try
            self._hits[place] += place < accepted
            self._tries[place] += 1

    def forget(self) -> None:
        """Weigh what is known by KEPT for each of RENEWED iterations."""
        for counts in (self._hits, self._tries):
            counts[:] = [KEPT**RENEWED * count for count in counts]

    def renew(self) -> None:
        chance = PRIOR  # where there is no experience a place is like the one before it
        for place, (hits, tries) in enumerate(zip(self._hits, self._tries)):
            self.chances[place] = chance = (chance + hits) / (1 + tries)


class Worth:
    """Gain of draft tokens so far, by two estimates. Trials at about as many rows decide whether
    any are proposed; the time of iterations by their tokens, and the chance of each draft token to
    be accepted, decide which of those proposed are verified.
    """

    def __init__(self, past: Past, costly: bool):
        self.proposes = True  # in the next iteration
        self._begins = True  # until an iteration had some
        self._past, self._curve, self._costly = past, Curve(), costly
        self._trials: defaultdict[int, Trial] = defaultdict(Trial)  # by the octave of rows
        self._trial = Trial()  # of this iteration
        # by tokens that matched before a row's draft tokens: a long match is right for longer
        self._acceptance: defaultdict[int, Acceptance] = defaultdict(Acceptance)
        self._planned = 0  # iterations

    def planned(self) -> None:
        """The next iteration is planned."""
        self._planned += 1
        for acceptance in self._acceptance.values():
            if self._planned % RENEWED == 0:
                acceptance.forget()
            if is_due(self._planned):
                acceptance.renew()

    def verified(self, drafts: Drafts, n: int, accepted: int) -> None:
        """Count a row's outcome: so many of n draft tokens were accepted."""
        drafts.hits = KEPT * drafts.hits + (accepted > 0)
        drafts.tries = KEPT * drafts.tries + 1
        self._acceptance[drafts.matched].add(n, accepted)

    def sampled(self, rows: int, tokens: int) -> None:
        """Count an iteration that is over, and decide whether the next one has drafts."""
        past, drafted = self._past, self._past.decoded > rows
        catches_up = self._begins and drafted  # a draft model then computes what it has missed
        if past.without_prompts:
            self._trial.add(tokens, past.took_s, is_typical=not catches_up)
            # before the first, drafts are looked for in whole prompts
            if self.proposes and not catches_up and past.without_prompts > 1:
                self._curve.add(past.decoded, past.took_s)
        self._begins = self._begins and not drafted
        self._trial, proposed = self._trials[rows.bit_length()], self.proposes
        self.proposes = not self._costly or self._trial.next()
        self._begins |= self.proposes > proposed

    def of(self, wanted: Shares, rows: int) -> Shares:
        """Return how many of each row's draft tokens to verify, so that tokens a second are most.
        rows: those that decode.
        """
        if not self._curve:
            return [(inference, 0) for inference, _ in wanted]
        found = [
            (chance, i)
            for i, (inference, k) in enumerate(wanted)
            for chance in self.chances(inference.drafts, k)
        ]
        found.sort(reverse=True)
        totals = list(accumulate((chance for chance, _ in found), initial=float(rows)))
        end = len(found)
        pairs = [pair for pair in self._curve.beyond(rows) if pair[0] < end]
        pairs.append((end, self._curve.at(rows + end)))
        rates = [totals[n] / seconds for n, seconds in pairs]
        best = max(rates)
        most = pairs[rates.index(best)][0] if best > GAIN * rates[0] else 0
        taken = Counter(i for _, i in found[:most])
        return [(inference, taken[i]) for i, (inference, _) in enumerate(wanted)]

    def chances(self, drafts: Drafts, k: int) -> list[float]:
        """Return the chance of each of k draft tokens to be accepted, by its place and by how many
        tokens matched before the row's first. If no match is looked for, the request's own outcomes
        count for the first, too.
        """
        chances = self._acceptance[drafts.matched].chances[:k]
        if chances and not drafts.matched:
            chances[0] = (OTHERS * chances[0] + drafts.hits) / (OTHERS + drafts.tries)
        return list(accumulate(chances, mul))
