//! Lemma *Stages in front* (docs/proofs.md): the eight increments that prefix stages add to the paths of a suffix.
//!
//! Prefix stages 0 … p are in front of a suffix with the paths [`Paths`]. The step is at least each of the eight sums
//! of [`PrefixIncrements::step_bounds_s`]. The increments of a prefix follow from the increments without its last stage
//! ([`PrefixIncrements::add_stage`]), and each is minimized by itself. So a table entry is not above the increments of
//! any plan.

use crate::planner::hybrid::bounds::paths::Paths;

/// Time that the prefix adds to each critical path of a suffix, in seconds. Each field is a lower bound over all
/// prefixes.
///
/// *a* and *b* are prefix stages, *M* is the number of micro-batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefixIncrements {
    /// Added to [`Paths::drained_s`]: forward, backward and both transfers of one micro-batch, through all prefix
    /// stages.
    pub(super) round_trip_s: f64,
    /// Added to [`Paths::synced_s`]: forward and transfer of one micro-batch through all prefix stages.
    pub(super) fill_s: f64,
    /// Added to [`Paths::first_back_s`]: a round trip, while stage *a* runs its other *M* − 1 backwards after that of
    /// micro-batch 0.
    pub(super) backward_busy_s: f64,
    /// Added to [`Paths::last_back_s`]: a round trip, while stage *a* runs its other *M* − 1 forwards before the last
    /// one.
    pub(super) forward_busy_s: f64,
    /// Added to [`Paths::last_synced_s`]: like `forward_busy_s`, but one way only, to the suffix.
    pub(super) forward_busy_to_end_s: f64,
    /// Added to [`Paths::drained_s`]: forwards down to the suffix, backwards up to stage *a*, then its gradient
    /// all-reduce.
    pub(super) grad_reduce_s: f64,
    /// Added to [`Paths::first_back_s`]: stage *a* is busy except while it waits for its first round trip. Then
    /// backwards up to stage *b* ≤ *a*, and its gradient all-reduce.
    pub(super) first_wait_s: f64,
    /// Added to [`Paths::first_back_s`] plus [`Paths::last_back_s`]: like `first_wait_s`, but stage *a* also waits for
    /// its last round trip. Only valid if *M* exceeds the in-flight limit of *a*.
    pub(super) both_waits_s: f64,
}

impl PrefixIncrements {
    /// Increments where no prefix fits.
    pub(super) const INFEASIBLE: Self = Self::all(f64::INFINITY, f64::INFINITY);

    /// Increments of the empty prefix, which adds nothing and has no stage that waits.
    pub(crate) const EMPTY_PREFIX: Self = Self::all(0.0, f64::NEG_INFINITY);

    /// Returns equal increments, except for `both_waits_s`.
    const fn all(each_s: f64, both_waits_s: f64) -> Self {
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

/// Last stage of a prefix and its transfer to the stage behind it, as two addends for each increment.
///
/// An increment is a maximum over the choice of stage *a*. Both arrays are in the order of the fields of
/// [`PrefixIncrements`].
pub(super) struct PrefixStage {
    /// Added to the increment of the stages in front, if *a* is one of them.
    through_s: [f64; 8],
    /// Added to a path through the stages in front, if *a* is this stage.
    own_s: [f64; 8],
    grad_reduce_s: f64,
}

impl PrefixStage {
    /// Returns the addends of a stage with these times and at most `max_in_flight` micro-batches in flight.
    pub(super) fn new(
        forward_s: f64,
        backward_s: f64,
        grad_reduce_s: f64,
        transfer_s: f64,
        max_in_flight: u32,
        micro_batches: u32,
    ) -> Self {
        let count = f64::from(micro_batches);
        let skipped = f64::from(max_in_flight - 1); // A wait takes the place of this many forwards, or backwards.
        let work_s = forward_s + backward_s;
        let round_trip_s = work_s + 2.0 * transfer_s;
        let fill_s = forward_s + transfer_s;
        let (others_forward_s, others_backward_s) = ((count - 1.0) * forward_s, (count - 1.0) * backward_s);
        // From F(0), the stage waits for B(0) in place of the skipped forwards. The rest of the wait is in
        // `first_back_s`, and the rest of the path to this stage in the increments in front.
        let first_wait_s = 2.0 * transfer_s + count * work_s - skipped * forward_s;
        // If F(M - 1) comes before B(0), the two waits overlap, and their sum is no path.
        let both_waits_s = if max_in_flight < micro_batches {
            4.0 * transfer_s + (count - skipped) * work_s
        } else {
            f64::NEG_INFINITY
        };
        Self {
            through_s: [
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
                first_wait_s,
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
        let mut lowest = Self::INFEASIBLE;
        lowest.add_stage(&stage, self);
        lowest
    }

    /// Lowers each increment to the increment of a prefix that ends in `stage` and has `before` in front of it, if that
    /// is smaller.
    #[inline]
    pub(super) fn add_stage(&mut self, stage: &PrefixStage, before: &Self) {
        let Self { round_trip_s, fill_s, .. } = *before;
        // Stage b, whose all-reduce ends the path, is one of the stages in front, or this one.
        let synced_s = fast_max(before.grad_reduce_s, fill_s + stage.grad_reduce_s);
        let lower = |value: &mut f64, at: usize, before_s: f64, path_s: f64| {
            *value = fast_min(*value, fast_max(before_s + stage.through_s[at], path_s + stage.own_s[at]));
        };
        lower(&mut self.round_trip_s, 0, round_trip_s, round_trip_s);
        lower(&mut self.fill_s, 1, fill_s, fill_s);
        lower(&mut self.backward_busy_s, 2, before.backward_busy_s, round_trip_s);
        lower(&mut self.forward_busy_s, 3, before.forward_busy_s, round_trip_s);
        lower(&mut self.forward_busy_to_end_s, 4, before.forward_busy_to_end_s, fill_s);
        lower(&mut self.grad_reduce_s, 5, before.grad_reduce_s, fill_s);
        lower(&mut self.first_wait_s, 6, before.first_wait_s, synced_s);
        lower(&mut self.both_waits_s, 7, before.both_waits_s, synced_s);
    }

    /// Returns the eight sums with the paths of a suffix, in seconds. The step is at least each of them.
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

    /// Returns a lower bound on the step of plans with this prefix, if one micro-batch takes at least `behind_s` behind
    /// it.
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
        // Of a suffix, `trip` is at most each path that goes there and back. `both_waits` has two of them.
        let through_s = round_trip_s
            .max(backward_busy_s)
            .max(forward_busy_s)
            .max(grad_reduce_s)
            .max(first_wait_s)
            .max(both_waits_s + behind_s);
        (through_s + behind_s).max(fill_s).max(forward_busy_to_end_s)
    }

    /// Returns the minimum of each increment by itself.
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
