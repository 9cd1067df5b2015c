//! Lemma *Lengths of a suffix* (docs/proofs.md#lengths-of-a-suffix): every field of [`Paths`] is a lower bound on one
//! length of the suffix, in every execution. `synced` of the whole pipeline is a lower bound on the step.
//!
//! Every path through the graph of actions bounds the simulated step from below. Paths are composed stage by stage,
//! from the last one backwards. A stage runs `w` forwards before its first backward, and `M` micro-batches in all. Each
//! suffix keeps these paths, measured from the start of its first forward `F(0)`, of its last forward `F(M-1)` or, for
//! `trip`, of any forward `F(i)`:
//!
//! ```text
//! trip         F(i) ─▶ down to the last stage ─▶ up again ─▶ end of B(i)       one micro-batch, no waiting
//! first_back   F(0) ─▶ end of B(0)           B(0) also waits for the first stage's w forwards
//! last_back    F(M-1) ─▶ end of B(M-1)       B(M-1) also waits for its last w backwards
//! last_synced  F(M-1) ─▶ end of everything   gradient reduction of each stage included
//! last_start   F(0) ─▶ start of F(M-1)       the first stage is busy all the time, but for one wait for B(0)
//! busy         F(0) ─▶ end of B(M-1)         the first stage is busy, but for waits for B(0) and B(M-1)
//! drained      F(0) ─▶ end of B(M-1)         some stage is busy, or a link, with waits in between
//! synced       F(0) ─▶ end of everything
//! ```
//!
//! Waiting for a round trip takes the place of work. A stage that waits after its F(0) for its B(0) skips the `w - 1`
//! forwards in between; one that waits after F(M-1) for B(M-1) skips `w - 1` backwards; one that waits in between skips
//! `w - 1` of both. A stage may also wait for the one above: after its B(i), for that stage's B(i) and F(i + w above),
//! and so for its own F(i + w above). Such a *loop* skips `d` forwards and `d` backwards, where `d` is the difference
//! of the two limits in flight. A link that waits for round trips of the stage above it skips the `w` messages in
//! between.
//!
//! A busy stage need not be busy at both ends: the path may take the first `w - 1` forwards of a slower stage above
//! it, from which its micro-batch `w - 1` comes, and the last `w - 1` backwards of a slower stage above, to which its
//! micro-batch `M - w` goes. Only one such [`Middle`] is kept: the one whose path is predicted to become the longest.

use crate::planner::effort::passes;

/// Lengths of the paths of a suffix, in seconds. The module describes each of them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Paths {
    pub trip_s: f64,
    pub first_back_s: f64,
    pub last_back_s: f64,
    pub last_synced_s: f64,
    pub last_start_s: f64,
    pub busy_s: f64,
    pub drained_s: f64,
    pub synced_s: f64,
    /// Forward and backward of the first stage, for one micro-batch.
    pub work_s: f64,
    /// A stage of the suffix that is busy, and a path through the stages above it.
    pub middle: Middle,
}

/// A stage that is busy from its F(w - 1) to its B(M - w), seen from the suffix's first stage.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Middle {
    /// Time from F(w - 1) of the suffix's first stage to its B(M - w), where `w` belongs to the busy stage.
    pub(super) through_s: f64,
    /// Micro-batches at each end that the busy stage leaves out: its `w - 1`.
    pub(super) ends: f64,
    /// Longest forward of the busy stage and the stages above it.
    pub(super) forward_s: f64,
    /// Longest backward of the busy stage and the stages above it.
    pub(super) backward_s: f64,
}

impl Middle {
    /// Returns the time from F(0) to the end of B(M - 1).
    pub(crate) fn path_s(&self) -> f64 {
        self.through_s + self.ends * (self.forward_s + self.backward_s)
    }

    /// Returns an estimate of the path in the complete pipeline, in which stages still to come may be slower at both
    /// ends.
    fn predicted_s(&self) -> f64 {
        self.through_s + self.ends * (self.forward_s + self.backward_s) * passes::SLOWER_IN_FRONT
    }
}

/// Inputs of the paths for one stage. Times are for one micro-batch, in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PathStage {
    pub forward_s: f64,
    pub backward_s: f64,
    pub grad_reduce_s: f64,
    /// Smallest number of micro-batches in flight that the stage may have.
    pub min_in_flight: u32,
    /// Largest number in flight. It is equal to the smallest one where the number is known.
    pub max_in_flight: u32,
    /// Time for which a message occupies the link to the next stage, in each direction.
    pub busy_s: f64,
    /// Delay of a message behind its time on the link.
    pub latency_s: f64,
}

impl PathStage {
    /// Returns the stage with passes that take its transfers as well, for `exposed_s` each
    /// ([`crate::planner::hybrid::Settings::exposed_transfer_s`]).
    pub(crate) fn with_exposed_transfers(self, exposed_s: f64) -> Self {
        Self {
            forward_s: self.forward_s + exposed_s,
            backward_s: self.backward_s + exposed_s,
            // The passes of both ends contain the message. What is left of the link is its latency.
            busy_s: if exposed_s > 0.0 { 0.0 } else { self.busy_s },
            ..self
        }
    }
}

impl Paths {
    /// Returns the paths of the suffix with one more stage in front. The first stage of the suffix has at least
    /// `next_in_flight` micro-batches in flight.
    pub(crate) fn extend(&self, stage: &PathStage, next_in_flight: u32, micro_batches: u32) -> Self {
        // With more micro-batches in flight, waits become shorter, and the work that must run before them becomes
        // longer. Each part of a path takes the end of the range at which it is shortest, so the bound holds for every
        // number between.
        let PathStage { forward_s, backward_s, grad_reduce_s, min_in_flight, max_in_flight, busy_s: link_s, latency_s } =
            *stage;
        let work_s = forward_s + backward_s;
        let transfer_s = link_s + latency_s;
        let down_and_up = |path_s: f64| path_s + 2.0 * transfer_s;
        let (count, skipped) = (f64::from(micro_batches), f64::from(max_in_flight - 1));
        let min_skipped = f64::from(min_in_flight - 1);
        let is_alternating = micro_batches > max_in_flight; // Otherwise all forwards come before all backwards.

        let (first_s, last_s, trip_s) =
            (down_and_up(self.first_back_s), down_and_up(self.last_back_s), down_and_up(self.trip_s));
        let first_back_s = (first_s + work_s).max((min_skipped + 1.0) * forward_s + backward_s);
        let last_back_s = (last_s + work_s).max(forward_s + (min_skipped + 1.0) * backward_s);
        let last_synced_s = (forward_s + transfer_s + self.last_synced_s).max(last_back_s + grad_reduce_s);

        // Path 1: the new stage is busy, except while it waits for B(0) or for B(M - 1).
        let wait_first_s = (first_s - skipped * forward_s).max(0.0);
        let mut wait_s = wait_first_s.max(last_s - skipped * backward_s);
        let mut waits_s = wait_s;
        let mut last_start_s = (count - 1.0) * forward_s;
        if is_alternating {
            last_start_s += (count - skipped - 1.0) * backward_s + wait_first_s;
            // B(0) comes before F(M - 1), so the two waits do not overlap, and their sum is a path. Waits between them
            // do not overlap either: each begins right behind the backward that ends the one before it.
            wait_s = wait_s.max(first_s + last_s - skipped * work_s);
            let between = f64::from((micro_batches - 1) / max_in_flight - 1);
            waits_s = wait_s.max(first_s + last_s - skipped * work_s + between * (trip_s - skipped * work_s).max(0.0));
        }
        // Path 2: the link below is busy, except while it waits for round trips. Each of these takes the place of `w`
        // messages.
        let round_trips = f64::from((micro_batches - 1) / max_in_flight);
        let trips_s = round_trips * (trip_s + work_s - f64::from(max_in_flight) * link_s).max(0.0);
        let link_start_s = forward_s + count * link_s + latency_s + trips_s;
        // Path 3: the stage below is busy, except for loops through the new stage. Loop q begins with B((q - 1)
        // (difference + 1)) of the stage below, and the last one ends at its F(M - 1) at the latest, so they do not
        // overlap.
        let difference = max_in_flight.saturating_sub(next_in_flight);
        let loops = if is_alternating { (micro_batches - 1 - max_in_flight) / (difference + 1) + 1 } else { 0 };
        let loops_s = f64::from(loops) * (down_and_up(work_s) - f64::from(difference) * self.work_s).max(0.0);
        let next_start_s = forward_s + transfer_s + self.last_start_s + loops_s;

        // Path 4: a stage further below is busy, except for its first forwards and last backwards.
        let kept = Middle {
            through_s: down_and_up(self.middle.through_s) + work_s,
            ends: self.middle.ends,
            forward_s: self.middle.forward_s.max(forward_s),
            backward_s: self.middle.backward_s.max(backward_s),
        };
        let own = Middle { through_s: (count - min_skipped) * work_s, ends: min_skipped, forward_s, backward_s };
        let drained_s = (down_and_up(self.drained_s) + work_s)
            .max(kept.path_s())
            .max(count * work_s + waits_s)
            .max(link_start_s + self.trip_s + transfer_s + backward_s)
            .max(down_and_up(self.busy_s) + work_s + loops_s);
        let synced_s = (forward_s + transfer_s + self.synced_s)
            .max(drained_s + grad_reduce_s)
            .max(last_start_s + last_synced_s)
            .max(link_start_s.max(next_start_s) + self.last_synced_s);
        Self {
            trip_s: trip_s + work_s,
            first_back_s,
            last_back_s,
            last_synced_s,
            last_start_s,
            busy_s: count * work_s + wait_s,
            drained_s,
            synced_s,
            work_s,
            // Every middle gives a bound, so choosing one by prediction is safe.
            middle: if kept.predicted_s() > own.predicted_s() { kept } else { own },
        }
    }

    /// Returns the paths rounded down to multiples of `grid_s`, so that suffixes that hardly differ become equal.
    pub(crate) fn rounded_down(&self, grid_s: f64) -> Self {
        // No path is negative, so a cast to an integer is the same as `floor`, and faster.
        let down = |path_s: f64| (path_s / grid_s) as i64 as f64 * grid_s;
        Self {
            trip_s: down(self.trip_s),
            first_back_s: down(self.first_back_s),
            last_back_s: down(self.last_back_s),
            last_synced_s: down(self.last_synced_s),
            last_start_s: down(self.last_start_s),
            busy_s: down(self.busy_s),
            drained_s: down(self.drained_s),
            synced_s: down(self.synced_s),
            middle: Middle {
                through_s: down(self.middle.through_s),
                forward_s: down(self.middle.forward_s),
                backward_s: down(self.middle.backward_s),
                ..self.middle
            },
            // The work of the first stage stays exact: loops subtract it, so a smaller value would raise their bound.
            work_s: self.work_s,
        }
    }
}
