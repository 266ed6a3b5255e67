"""Which faults there are, where, how often; and a chain of them."""

from __future__ import annotations

from dataclasses import dataclass

import chaos_damage as damage
import chaos_faults as faults
from chaos_chain import Chain, Missed, Wrong
from chaos_faults import Strike

_LOCAL, _ALL, _APART = ("local",), ("local", "ranks", "ray"), ("ranks", "ray")
_AFTER_THE_END = 0.5
"""Chance that a folder whose run is done is struck once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault. `weight`: how often, beside the others of a placement."""

    name: str
    strike: Strike
    weight: int
    placements: tuple[str, ...] = _ALL
    at_rest: bool = False
    from_start: bool = True
    """Whether it may strike before the session has begun, or needs one that trains."""
    on_a_disk: bool = False

    def fits(self, chain: Chain) -> bool:
        return (
            chain.base in self.placements
            and (not self.on_a_disk or chain.disk is not None)
            and (self.at_rest or not chain.is_done)
        )


FAULTS = (
    Fault(name="kill -9", strike=faults.kill_the_process, weight=6),
    Fault(name="kill -9 of all at once", strike=faults.kill_all_at_once, weight=3),
    Fault(name="kill -9 of a rank or an actor", strike=faults.kill_a_part, weight=10, placements=_APART),
    Fault(name="freeze for a moment", strike=faults.freeze_for_a_moment, weight=4),
    Fault(name="freeze for good", strike=faults.freeze_for_good, weight=2),
    Fault(name="terminate once", strike=faults.terminate_once, weight=6),
    Fault(name="terminate twice", strike=faults.terminate_twice, weight=5),
    Fault(name="terminate again and again", strike=faults.terminate_again_and_again, weight=2),
    Fault(name="second driver", strike=faults.second_driver, weight=3),
    Fault(name="two drivers at once", strike=damage.two_drivers_at_once, weight=2, at_rest=True),
    Fault(name="full disk for good", strike=faults.full_disk_for_good, weight=6, on_a_disk=True),
    Fault(name="full disk for a moment", strike=faults.full_disk_for_a_moment, weight=6, on_a_disk=True),
    Fault(name="damaged checkpoint", strike=damage.damaged_checkpoint, weight=4, at_rest=True),
    Fault(name="damaged pointer", strike=damage.damaged_pointer, weight=1, at_rest=True),
    Fault(name="torn last lines", strike=damage.torn_lines, weight=2, at_rest=True),
    Fault(name="removed lines", strike=damage.removed_lines, weight=2, at_rest=True),
    Fault(name="broken summary, manifest or config", strike=damage.broken_record, weight=2, at_rest=True),
    Fault(name="left-overs", strike=damage.left_overs, weight=1, at_rest=True),
    Fault(name="hung reward", strike=faults.hung_reward, weight=2, from_start=False),
    Fault(name="hung reward, terminated", strike=faults.hung_reward_terminated, weight=1, from_start=False),
    Fault(name="killed or raising reward", strike=faults.killed_reward, weight=4, from_start=False),
    Fault(name="control: checkpoint, set, resume", strike=faults.control_goes_on, weight=3, from_start=False),
    Fault(name="control: pause", strike=faults.control_pause, weight=3, from_start=False),
    Fault(name="control: stop", strike=faults.control_stop, weight=2, from_start=False),
    Fault(name="resume elsewhere", strike=damage.elsewhere, weight=2, at_rest=True),
)


def run_chain(chain: Chain, most: int) -> None:
    """Strike a folder up to `most` times, and let its run end."""
    try:
        missed = 0
        while len(chain.struck) < min(most, chain.most) and missed < 3:
            if chain.is_done and chain.chance.random() > _AFTER_THE_END:
                break
            fitting = [fault for fault in FAULTS if fault.fits(chain)]
            (fault,) = chain.chance.choices(fitting, weights=[each.weight for each in fitting])
            try:
                chain.strike(fault.name, fault.strike, at_rest=fault.at_rest, from_start=fault.from_start)
            except Missed:
                missed += 1
        chain.finish()
    except Wrong as wrong:
        chain.abandon(str(wrong))
