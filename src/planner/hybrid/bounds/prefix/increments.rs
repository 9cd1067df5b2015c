//! Lemma *Stages in front* (docs/proofs.md): the eight lengths that prefix stages add to the paths of a suffix.
//!
//! Prefix stages 0 … p stand in front of a suffix with the paths [`Paths`]. The step is at least each of the eight sums of
//! [`PrefixIncrements::step_bounds_s`]. Each increment of one more prefix stage follows from those of the stages before it
//! ([`PrefixIncrements::add_stage`]), and is minimized by itself. So a table entry is not above the increments of any plan.

use crate::planner::hybrid::bounds::paths::Paths;

/// What the stages in front of a cut add, in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefixIncrements {
    /// To `drained`: forwards, backwards and transfers both ways of one micro-batch.
    pub(super) trip_s: f64,
    /// To `synced`: forwards and transfers of one micro-batch.
    pub(super) fill_s: f64,
    /// To `first_back`: one of the stages still has all backwards before it.
    pub(super) backward_busy_s: f64,
    /// To `last_back`: one of the stages had all forwards behind it.
    pub(super) forward_busy_s: f64,
    /// To `last_synced`: likewise.
    pub(super) forward_busy_to_end_s: f64,
    /// To `drained`: the way up to one of the stages, and its gradient synchronisation.
    pub(super) grad_reduce_s: f64,
    /// To `first_back`: one of the stages waits for its first round trip, less the forwards that take place meanwhile;
    /// then the way up from there to one of the stages, and its gradient synchronisation.
    pub(super) first_wait_s: f64,
    /// To `first_back` and `last_back` together: likewise, for its last round trip, too.
    pub(super) both_waits_s: f64,
}

impl PrefixIncrements {
    /// No stages fit there.
    pub(super) const INFEASIBLE: Self = Self::all(f64::INFINITY, f64::INFINITY);

    /// Nothing is in front, so nobody waits.
    pub(crate) const EMPTY_PREFIX: Self = Self::all(0.0, f64::NEG_INFINITY);

    pub(super) const fn all(each_s: f64, both_waits_s: f64) -> Self {
        Self {
            trip_s: each_s,
            fill_s: each_s,
            backward_busy_s: each_s,
            forward_busy_s: each_s,
            forward_busy_to_end_s: each_s,
            grad_reduce_s: each_s,
            first_wait_s: each_s,
            both_waits_s,
        }
    }
}

/// The lesser of two numbers, in one instruction.
#[inline]
pub(super) fn fast_min(one: f64, other: f64) -> f64 {
    if other < one { other } else { one }
}

/// The greater of two numbers, in one instruction.
#[inline]
pub(super) fn fast_max(one: f64, other: f64) -> f64 {
    if other > one { other } else { one }
}

/// Names of [`PrefixIncrements::step_bounds_s`].
#[cfg(test)]
pub(crate) const INCREMENTS: [&str; 8] = ["trip", "syncs", "fill", "backwards", "forwards", "starts", "waits", "both"];

/// What a stage in front of a cut, and its transfer to the stage behind it, do to each of them, in their order: each
/// becomes the longer of itself and this, and of a way through the stages before to this one and what that takes.
pub(super) struct PrefixStage {
    pub(super) longer_s: [f64; 8],
    pub(super) own_s: [f64; 8],
    pub(super) sync_s: f64,
}

impl PrefixStage {
    pub(super) fn new(
        forward_s: f64,
        backward_s: f64,
        sync_s: f64,
        transfer_s: f64,
        window: u32,
        micro_batches: u32,
    ) -> Self {
        let count = f64::from(micro_batches);
        let skipped = f64::from(window - 1);
        let work_s = forward_s + backward_s;
        let trip_s = work_s + 2.0 * transfer_s;
        let fill_s = forward_s + transfer_s;
        let (others_forward_s, others_backward_s) = ((count - 1.0) * forward_s, (count - 1.0) * backward_s);
        let wait_s = 2.0 * transfer_s + count * work_s - skipped * forward_s;
        let both_waits_s =
            if window < micro_batches { 4.0 * transfer_s + (count - skipped) * work_s } else { f64::NEG_INFINITY };
        Self {
            longer_s: [trip_s, fill_s, trip_s, trip_s, fill_s, trip_s, trip_s, 2.0 * trip_s],
            own_s: [
                trip_s,
                fill_s,
                trip_s + others_backward_s,
                trip_s + others_forward_s,
                fill_s + others_forward_s,
                trip_s + sync_s,
                wait_s,
                both_waits_s,
            ],
            sync_s,
        }
    }
}

impl PrefixIncrements {
    /// What these stages and one more behind them add.
    #[cfg(test)]
    pub(crate) fn behind(&self, stage: &crate::planner::hybrid::bounds::paths::PathStage, micro_batches: u32) -> Self {
        let transfer_s = stage.busy_s + stage.latency_s;
        let (forward_s, backward_s, sync_s) = (stage.forward_s, stage.backward_s, stage.sync_s);
        let stage = PrefixStage::new(forward_s, backward_s, sync_s, transfer_s, stage.window, micro_batches);
        let mut least = Self::INFEASIBLE;
        least.add_stage(&stage, self);
        least
    }

    /// Takes a stage into account that has `before` in front of it.
    #[inline]
    pub(super) fn add_stage(&mut self, stage: &PrefixStage, before: &Self) {
        let Self { trip_s, fill_s, .. } = *before;
        // The way back up to one of the stages, or to this one, and the synchronisation of that one.
        let synced_s = fast_max(before.grad_reduce_s, fill_s + stage.sync_s);
        let add_stage = |value: &mut f64, at: usize, own_s: f64, way_s: f64| {
            *value = fast_min(*value, fast_max(own_s + stage.longer_s[at], way_s + stage.own_s[at]));
        };
        add_stage(&mut self.trip_s, 0, trip_s, trip_s);
        add_stage(&mut self.fill_s, 1, fill_s, fill_s);
        add_stage(&mut self.backward_busy_s, 2, before.backward_busy_s, trip_s);
        add_stage(&mut self.forward_busy_s, 3, before.forward_busy_s, trip_s);
        add_stage(&mut self.forward_busy_to_end_s, 4, before.forward_busy_to_end_s, fill_s);
        add_stage(&mut self.grad_reduce_s, 5, before.grad_reduce_s, fill_s);
        add_stage(&mut self.first_wait_s, 6, before.first_wait_s, synced_s);
        add_stage(&mut self.both_waits_s, 7, before.both_waits_s, synced_s);
    }

    /// With the paths of a suffix: a step is none of these shorter. [`INCREMENTS`] names them.
    #[inline]
    pub(crate) fn step_bounds_s(&self, paths: &Paths) -> [f64; 8] {
        [
            paths.drained_s + self.trip_s,
            paths.drained_s + self.grad_reduce_s,
            paths.synced_s + self.fill_s,
            paths.first_back_s + self.backward_busy_s,
            paths.last_back_s + self.forward_busy_s,
            paths.last_synced_s + self.forward_busy_to_end_s,
            paths.first_back_s + self.first_wait_s,
            paths.first_back_s + paths.last_back_s + self.both_waits_s,
        ]
    }

    /// No plan with these stages in front is shorter, if a micro-batch takes so long behind them.
    pub(super) fn least_s(&self, behind_s: f64) -> f64 {
        let Self {
            trip_s,
            fill_s,
            backward_busy_s,
            forward_busy_s,
            forward_busy_to_end_s,
            grad_reduce_s,
            first_wait_s,
            both_waits_s,
        } = *self;
        let through_s = trip_s
            .max(backward_busy_s)
            .max(forward_busy_s)
            .max(grad_reduce_s)
            .max(first_wait_s)
            .max(both_waits_s + behind_s);
        (through_s + behind_s).max(fill_s).max(forward_busy_to_end_s)
    }

    /// The lesser of each.
    pub(super) fn min(&self, other: &Self) -> Self {
        Self {
            trip_s: self.trip_s.min(other.trip_s),
            fill_s: self.fill_s.min(other.fill_s),
            backward_busy_s: self.backward_busy_s.min(other.backward_busy_s),
            forward_busy_s: self.forward_busy_s.min(other.forward_busy_s),
            forward_busy_to_end_s: self.forward_busy_to_end_s.min(other.forward_busy_to_end_s),
            grad_reduce_s: self.grad_reduce_s.min(other.grad_reduce_s),
            first_wait_s: self.first_wait_s.min(other.first_wait_s),
            both_waits_s: self.both_waits_s.min(other.both_waits_s),
        }
    }
}
