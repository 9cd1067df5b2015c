//! Lemma *Dominance* (docs/proofs.md#dominance): let no path of suffix A be longer than that path of suffix B, nor any
//! part of the middle, nor `busy − M W`, nor `last_start − M W`. Then for every completion, the bound that the search
//! computes with A is at most the step of the plan with B.

use super::paths::{Middle, Paths};

impl Middle {
    /// Returns whether no part is larger than that of `other`.
    fn dominates(&self, other: &Self) -> bool {
        self.through_s <= other.through_s
            && self.ends <= other.ends
            && self.forward_s <= other.forward_s
            && self.backward_s <= other.backward_s
    }
}

impl Paths {
    /// Returns whether no path is longer than that of `other`. Then `other` can be dropped: no stages in front of both
    /// can make this suffix the worse one.
    pub(crate) fn dominates(&self, other: &Self, micro_batches: u32) -> bool {
        // A loop takes the place of work W of the first stage, so its value falls as W grows. A suffix with less work
        // could gain more from loops. Comparing what is left without that work rules this out.
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
