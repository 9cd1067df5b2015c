//! Lemma *Dominance* (docs/proofs.md#dominance): let suffix A be nowhere longer than B, in all paths, in all parts of the
//! middle, and in `busy − M W` and `last_start − M W`. Then for every completion, the bound that the search computes with A is
//! not above the step of the plan with B.
//!
//! The two differences count because a loop takes the place of work W of the first stage: what is left without any of that
//! work must not be longer either.

use super::paths::{Middle, Paths};

impl Middle {
    fn dominates(&self, other: &Self) -> bool {
        self.through_s <= other.through_s
            && self.ends <= other.ends
            && self.forward_s <= other.forward_s
            && self.backward_s <= other.backward_s
    }
}

impl Paths {
    /// Returns whether no path is longer than `other`'s: then nothing that goes in front can make this suffix the worse one.
    pub(crate) fn dominates(&self, other: &Self, micro_batches: u32) -> bool {
        let idle = |paths: &Self, path_s: f64| path_s - f64::from(micro_batches) * paths.work_s;
        self.synced_s <= other.synced_s
            && self.drained_s <= other.drained_s
            && self.busy_s <= other.busy_s
            && self.trip_s <= other.trip_s
            && self.first_back_s <= other.first_back_s
            && self.last_back_s <= other.last_back_s
            && self.last_synced_s <= other.last_synced_s
            && self.last_start_s <= other.last_start_s
            && idle(self, self.busy_s) <= idle(other, other.busy_s)
            && idle(self, self.last_start_s) <= idle(other, other.last_start_s)
            && self.middle.dominates(&other.middle)
    }
}
