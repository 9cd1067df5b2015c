//! Lemma *Stages in front* (docs/proofs.md): the eight lengths that prefix stages add to the paths of a suffix.
//!
//! Prefix stages 0 … p stand in front of a suffix with the paths [`Paths`]. The step is at least each of the eight sums of
//! [`PrefixIncrements::step_bounds_s`]. Each increment of one more prefix stage follows from those of the stages before it
//! ([`PrefixIncrements::add_stage`]), and is minimized by itself. So a table entry is not above the increments of any plan.

use crate::planner::hybrid::bounds::paths::Paths;

/// What the stages in front of a cut add, in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Least {
    /// To `drained`: forwards, backwards and transfers both ways of one micro-batch.
    pub(super) trip_s: f64,
    /// To `synced`: forwards and transfers of one micro-batch.
    pub(super) fill_s: f64,
    /// To `first_back`: one of the stages still has all backwards before it.
    pub(super) backwards_s: f64,
    /// To `last_back`: one of the stages had all forwards behind it.
    pub(super) forwards_s: f64,
    /// To `last_synced`: likewise.
    pub(super) starts_s: f64,
    /// To `drained`: the way up to one of the stages, and its gradient synchronisation.
    pub(super) syncs_s: f64,
    /// To `first_back`: one of the stages waits for its first round trip, less the forwards that take place meanwhile;
    /// then the way up from there to one of the stages, and its gradient synchronisation.
    pub(super) waits_s: f64,
    /// To `first_back` and `last_back` together: likewise, for its last round trip, too.
    pub(super) both_s: f64,
}

impl Least {
    /// No stages fit there.
    pub(super) const NONE: Self = Self::all(f64::INFINITY, f64::INFINITY);

    /// Nothing is in front, so nobody waits.
    pub(crate) const EMPTY: Self = Self::all(0.0, f64::NEG_INFINITY);

    pub(super) const fn all(each_s: f64, both_s: f64) -> Self {
        Self {
            trip_s: each_s,
            fill_s: each_s,
            backwards_s: each_s,
            forwards_s: each_s,
            starts_s: each_s,
            syncs_s: each_s,
            waits_s: each_s,
            both_s,
        }
    }
}

/// The lesser of two numbers, in one instruction.
#[inline]
pub(super) fn lesser(one: f64, other: f64) -> f64 {
    if other < one { other } else { one }
}

/// The greater of two numbers, in one instruction.
#[inline]
pub(super) fn greater(one: f64, other: f64) -> f64 {
    if other > one { other } else { one }
}

/// Names of [`Least::sums_s`].
#[cfg(test)]
pub(crate) const SUMS: [&str; 8] = ["trip", "syncs", "fill", "backwards", "forwards", "starts", "waits", "both"];

/// What a stage in front of a cut, and its transfer to the stage behind it, do to each of them, in their order: each
/// becomes the longer of itself and this, and of a way through the stages before to this one and what that takes.
pub(super) struct FrontStage {
    pub(super) longer_s: [f64; 8],
    pub(super) own_s: [f64; 8],
    pub(super) sync_s: f64,
}

impl FrontStage {
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
        let both_s =
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
                both_s,
            ],
            sync_s,
        }
    }
}

impl Least {
    /// What these stages and one more behind them add.
    #[cfg(test)]
    pub(crate) fn behind(&self, stage: &crate::planner::hybrid::bounds::paths::PathStage, micro_batches: u32) -> Self {
        let transfer_s = stage.busy_s + stage.latency_s;
        let (forward_s, backward_s, sync_s) = (stage.forward_s, stage.backward_s, stage.sync_s);
        let stage = FrontStage::new(forward_s, backward_s, sync_s, transfer_s, stage.window, micro_batches);
        let mut least = Self::NONE;
        least.lower(&stage, self);
        least
    }

    /// Takes a stage into account that has `before` in front of it.
    #[inline]
    pub(super) fn lower(&mut self, stage: &FrontStage, before: &Self) {
        let Self { trip_s, fill_s, .. } = *before;
        // The way back up to one of the stages, or to this one, and the synchronisation of that one.
        let synced_s = greater(before.syncs_s, fill_s + stage.sync_s);
        let lower = |value: &mut f64, at: usize, own_s: f64, way_s: f64| {
            *value = lesser(*value, greater(own_s + stage.longer_s[at], way_s + stage.own_s[at]));
        };
        lower(&mut self.trip_s, 0, trip_s, trip_s);
        lower(&mut self.fill_s, 1, fill_s, fill_s);
        lower(&mut self.backwards_s, 2, before.backwards_s, trip_s);
        lower(&mut self.forwards_s, 3, before.forwards_s, trip_s);
        lower(&mut self.starts_s, 4, before.starts_s, fill_s);
        lower(&mut self.syncs_s, 5, before.syncs_s, fill_s);
        lower(&mut self.waits_s, 6, before.waits_s, synced_s);
        lower(&mut self.both_s, 7, before.both_s, synced_s);
    }

    /// With the paths of a suffix: a step is none of these shorter. [`SUMS`] names them.
    #[inline]
    pub(crate) fn sums_s(&self, paths: &Paths) -> [f64; 8] {
        [
            paths.drained_s + self.trip_s,
            paths.drained_s + self.syncs_s,
            paths.synced_s + self.fill_s,
            paths.first_back_s + self.backwards_s,
            paths.last_back_s + self.forwards_s,
            paths.last_synced_s + self.starts_s,
            paths.first_back_s + self.waits_s,
            paths.first_back_s + paths.last_back_s + self.both_s,
        ]
    }

    /// No plan with these stages in front is shorter, if a micro-batch takes so long behind them.
    pub(super) fn least_s(&self, behind_s: f64) -> f64 {
        let Self { trip_s, fill_s, backwards_s, forwards_s, starts_s, syncs_s, waits_s, both_s } = *self;
        let through_s = trip_s.max(backwards_s).max(forwards_s).max(syncs_s).max(waits_s).max(both_s + behind_s);
        (through_s + behind_s).max(fill_s).max(starts_s)
    }

    /// The lesser of each.
    pub(super) fn or(&self, other: &Self) -> Self {
        Self {
            trip_s: self.trip_s.min(other.trip_s),
            fill_s: self.fill_s.min(other.fill_s),
            backwards_s: self.backwards_s.min(other.backwards_s),
            forwards_s: self.forwards_s.min(other.forwards_s),
            starts_s: self.starts_s.min(other.starts_s),
            syncs_s: self.syncs_s.min(other.syncs_s),
            waits_s: self.waits_s.min(other.waits_s),
            both_s: self.both_s.min(other.both_s),
        }
    }
}
