//! Lemma *Stages in front* (docs/proofs.md): the eight lengths that prefix stages add to the paths of a suffix.
//!
//! Prefix stages 0 … p stand in front of a suffix with the paths [`Paths`]. The step is at least each of the eight sums of
//! [`PrefixIncrements::step_bounds_s`]. Each increment of one more prefix stage follows from those of the stages before it
//! ([`PrefixIncrements::add_stage`]), and is minimized by itself. So a table entry is not above the increments of any plan.

use crate::planner::hybrid::bounds::paths::Paths;

/// Time that the prefix adds to each critical path of a suffix, in seconds. Each field is a lower bound over all prefixes.
///
/// *a* and *b* are prefix stages, *M* is the number of micro-batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefixIncrements {
    /// Added to [`Paths::drained_s`]: forward, backward and both transfers of one micro-batch, through all prefix stages.
    pub(super) round_trip_s: f64,
    /// Added to [`Paths::synced_s`]: forward and transfer of one micro-batch through all prefix stages.
    pub(super) fill_s: f64,
    /// Added to [`Paths::first_back_s`]: a round trip, while stage *a* runs its other *M* − 1 backwards after that of
    /// micro-batch 0.
    pub(super) backward_busy_s: f64,
    /// Added to [`Paths::last_back_s`]: a round trip, while stage *a* runs its other *M* − 1 forwards before the last one.
    pub(super) forward_busy_s: f64,
    /// Added to [`Paths::last_synced_s`]: like `forward_busy_s`, but without the way back.
    pub(super) forward_busy_to_end_s: f64,
    /// Added to [`Paths::drained_s`]: the way back to stage *a*, then its gradient all-reduce.
    pub(super) grad_reduce_s: f64,
    /// Added to [`Paths::first_back_s`]: stage *a* is busy except while it waits for its first round trip. Then the way back
    /// to stage *b* ≤ *a*, and its gradient all-reduce.
    pub(super) first_wait_s: f64,
    /// Added to [`Paths::first_back_s`] plus [`Paths::last_back_s`]: like `first_wait_s`, but stage *a* also waits for its
    /// last round trip. Only valid if *M* exceeds the in-flight limit of *a*.
    pub(super) both_waits_s: f64,
}

impl PrefixIncrements {
    /// Entry where no prefix fits.
    pub(super) const INFEASIBLE: Self = Self::all(f64::INFINITY, f64::INFINITY);

    /// Entry of the empty prefix, which adds nothing and has no stage that waits.
    pub(crate) const EMPTY_PREFIX: Self = Self::all(0.0, f64::NEG_INFINITY);

    pub(super) const fn all(each_s: f64, both_waits_s: f64) -> Self {
        Self {
            round_trip_s: each_s,
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

/// Returns the smaller number in one instruction. `f64::min` takes more, since it handles NaN.
#[inline]
pub(super) fn fast_min(one: f64, other: f64) -> f64 {
    if other < one { other } else { one }
}

/// Returns the larger number in one instruction. `f64::max` takes more, since it handles NaN.
#[inline]
pub(super) fn fast_max(one: f64, other: f64) -> f64 {
    if other > one { other } else { one }
}

/// Names of the sums of [`PrefixIncrements::step_bounds_s`], in their order.
#[cfg(test)]
pub(crate) const INCREMENTS: [&str; 8] = [
    "round_trip",
    "grad_reduce",
    "fill",
    "backward_busy",
    "forward_busy",
    "forward_busy_to_end",
    "first_wait",
    "both_waits",
];

/// A prefix stage and its transfer to the stage behind it.
///
/// Each increment becomes the longer one of two: what it was, plus `longer_s`; and a way through the stages in front of this
/// one, plus `own_s` if this is stage *a*. Both arrays are in the order of the fields of [`PrefixIncrements`].
pub(super) struct PrefixStage {
    pub(super) longer_s: [f64; 8],
    pub(super) own_s: [f64; 8],
    pub(super) grad_reduce_s: f64,
}

impl PrefixStage {
    pub(super) fn new(
        forward_s: f64,
        backward_s: f64,
        grad_reduce_s: f64,
        transfer_s: f64,
        max_in_flight: u32,
        micro_batches: u32,
    ) -> Self {
        let count = f64::from(micro_batches);
        let skipped = f64::from(max_in_flight - 1);
        let work_s = forward_s + backward_s;
        let round_trip_s = work_s + 2.0 * transfer_s;
        let fill_s = forward_s + transfer_s;
        let (others_forward_s, others_backward_s) = ((count - 1.0) * forward_s, (count - 1.0) * backward_s);
        let wait_s = 2.0 * transfer_s + count * work_s - skipped * forward_s;
        let both_waits_s = if max_in_flight < micro_batches {
            4.0 * transfer_s + (count - skipped) * work_s
        } else {
            f64::NEG_INFINITY
        };
        Self {
            longer_s: [
                round_trip_s,
                fill_s,
                round_trip_s,
                round_trip_s,
                fill_s,
                round_trip_s,
                round_trip_s,
                2.0 * round_trip_s,
            ],
            own_s: [
                round_trip_s,
                fill_s,
                round_trip_s + others_backward_s,
                round_trip_s + others_forward_s,
                fill_s + others_forward_s,
                round_trip_s + grad_reduce_s,
                wait_s,
                both_waits_s,
            ],
            grad_reduce_s,
        }
    }
}

impl PrefixIncrements {
    /// Returns the increments of these stages and one more behind them.
    #[cfg(test)]
    pub(crate) fn behind(&self, stage: &crate::planner::hybrid::bounds::paths::PathStage, micro_batches: u32) -> Self {
        let transfer_s = stage.busy_s + stage.latency_s;
        let (forward_s, backward_s, grad_reduce_s) = (stage.forward_s, stage.backward_s, stage.grad_reduce_s);
        let stage =
            PrefixStage::new(forward_s, backward_s, grad_reduce_s, transfer_s, stage.max_in_flight, micro_batches);
        let mut least = Self::INFEASIBLE;
        least.add_stage(&stage, self);
        least
    }

    /// Lowers each increment to that of a prefix that ends in `stage` and has `before` in front of it.
    #[inline]
    pub(super) fn add_stage(&mut self, stage: &PrefixStage, before: &Self) {
        let Self { round_trip_s, fill_s, .. } = *before;
        // The way back up to one of the stages, or to this one, and the synchronisation of that one.
        let synced_s = fast_max(before.grad_reduce_s, fill_s + stage.grad_reduce_s);
        let add_stage = |value: &mut f64, at: usize, own_s: f64, way_s: f64| {
            *value = fast_min(*value, fast_max(own_s + stage.longer_s[at], way_s + stage.own_s[at]));
        };
        add_stage(&mut self.round_trip_s, 0, round_trip_s, round_trip_s);
        add_stage(&mut self.fill_s, 1, fill_s, fill_s);
        add_stage(&mut self.backward_busy_s, 2, before.backward_busy_s, round_trip_s);
        add_stage(&mut self.forward_busy_s, 3, before.forward_busy_s, round_trip_s);
        add_stage(&mut self.forward_busy_to_end_s, 4, before.forward_busy_to_end_s, fill_s);
        add_stage(&mut self.grad_reduce_s, 5, before.grad_reduce_s, fill_s);
        add_stage(&mut self.first_wait_s, 6, before.first_wait_s, synced_s);
        add_stage(&mut self.both_waits_s, 7, before.both_waits_s, synced_s);
    }

    /// Returns the eight sums with the paths of a suffix. The step is at least each of them.
    #[inline]
    pub(crate) fn step_bounds_s(&self, paths: &Paths) -> [f64; 8] {
        [
            paths.drained_s + self.round_trip_s,
            paths.drained_s + self.grad_reduce_s,
            paths.synced_s + self.fill_s,
            paths.first_back_s + self.backward_busy_s,
            paths.last_back_s + self.forward_busy_s,
            paths.last_synced_s + self.forward_busy_to_end_s,
            paths.first_back_s + self.first_wait_s,
            paths.first_back_s + paths.last_back_s + self.both_waits_s,
        ]
    }

    /// Returns a lower bound on the step of plans with this prefix, if a micro-batch takes `behind_s` behind it.
    pub(super) fn min_s(&self, behind_s: f64) -> f64 {
        let Self {
            round_trip_s,
            fill_s,
            backward_busy_s,
            forward_busy_s,
            forward_busy_to_end_s,
            grad_reduce_s,
            first_wait_s,
            both_waits_s,
        } = *self;
        let through_s = round_trip_s
            .max(backward_busy_s)
            .max(forward_busy_s)
            .max(grad_reduce_s)
            .max(first_wait_s)
            .max(both_waits_s + behind_s);
        (through_s + behind_s).max(fill_s).max(forward_busy_to_end_s)
    }

    /// Returns the smaller one of each increment.
    pub(super) fn min(&self, other: &Self) -> Self {
        Self {
            round_trip_s: self.round_trip_s.min(other.round_trip_s),
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
