//! Lemma *Lengths of a suffix* (docs/proofs.md#lengths-of-a-suffix): every field of [`Paths`] is a lower bound on one length
//! of the suffix, in every execution. `synced` of the whole pipeline is one on the step.
//!
//! Every path through the graph of actions bounds the simulated step from below. Paths are composed stage by stage, from the
//! last one backwards. With `t = F + B` of a stage, `c` the transfer to the next stage, `M` micro-batches and `w`
//! forwards of warm-up, these paths are kept of each suffix of the pipeline, measured from the start of its first
//! forward, `F(0)`, or of its last one, `F(M-1)`:
//!
//! ```text
//! trip         F(i) ─▶ down to the last stage ─▶ up again ─▶ end of B(i)       one micro-batch, no waiting
//! first_back   F(0) ─▶ end of B(0)           B(0) also waits for the first stage's w forwards
//! last_back    F(M-1) ─▶ end of B(M-1)       B(M-1) also waits for its last w backwards
//! last_synced  F(M-1) ─▶ end of everything   gradient synchronisation of each stage included
//! last_start   F(0) ─▶ start of F(M-1)       the first stage is busy all the time, but for one wait for B(0)
//! busy         F(0) ─▶ end of B(M-1)         likewise, and for one wait for B(M-1)
//! drained      F(0) ─▶ end of B(M-1)         some stage is busy, or a link, with waits in between
//! synced       F(0) ─▶ end of everything
//! ```
//!
//! Waiting for a round trip takes the place of work. A stage that waits after its F(0) for its B(0) skips the `w - 1`
//! forwards in between; one that waits after F(M-1) for B(M-1) skips `w - 1` backwards; one that waits in between skips
//! `w - 1` of both. A stage may also wait for the one above: after its B(i), for that stage's B(i) and F(i + w above),
//! and so for its own F(i + w above). Such a *loop* skips as many forwards and backwards as the two windows differ by. A
//! link that waits for round trips of the stage above it skips the `w` messages in between.
//!
//! A busy stage needs not be busy at both ends: its first `w - 1` forwards may be those of a slower stage above it, from
//! which its micro-batch `w - 1` comes, and its last `w - 1` backwards those of one to which its micro-batch `M - w`
//! goes. One such [`Middle`] is kept, that whose path promises to be the longest.

use crate::planner::effort::passes;

/// Lengths of the paths above, in seconds.
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
    /// Forward and backward of the first stage.
    pub work_s: f64,
    pub middle: Middle,
}

/// A stage that is busy from its F(w - 1) to its B(M - w).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Middle {
    /// From F(w - 1) of the suffix's first stage to its B(M - w).
    pub(super) through_s: f64,
    /// `w - 1`.
    pub(super) ends: f64,
    /// The longest forward, and the longest backward, of it and the stages above.
    pub(super) forward_s: f64,
    pub(super) backward_s: f64,
}

impl Middle {
    /// Returns the time from F(0) to the end of B(M - 1).
    pub(crate) fn path_s(&self) -> f64 {
        self.through_s + self.ends * (self.forward_s + self.backward_s)
    }

    /// Returns a guess of how long the path may become, since stages still to come may be slower at both ends.
    fn promise_s(&self) -> f64 {
        self.through_s + self.ends * (self.forward_s + self.backward_s) * passes::SLOWER_IN_FRONT
    }
}

/// A stage as the paths see it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PathStage {
    pub forward_s: f64,
    pub backward_s: f64,
    pub grad_reduce_s: f64,
    /// Smallest and largest number in flight. They are equal where it is known.
    pub min_in_flight: u32,
    pub max_in_flight: u32,
    /// Transfer to the next stage, one way: time on the link, and the delay behind it.
    pub busy_s: f64,
    pub latency_s: f64,
}

impl Paths {
    /// Puts a stage in front of the suffix, whose first stage has at least the window `next_max_in_flight`.
    ///
    /// Waits shrink with the window, what must run before them grows: each path is as long as at the window, of those
    /// that the stage may have, at which it is shortest.
    pub(crate) fn extend(&self, stage: &PathStage, next_max_in_flight: u32, micro_batches: u32) -> Self {
        let PathStage { forward_s, backward_s, grad_reduce_s, min_in_flight, max_in_flight, busy_s: link_s, latency_s } =
            *stage;
        let work_s = forward_s + backward_s;
        let transfer_s = link_s + latency_s;
        let below = |path_s: f64| path_s + 2.0 * transfer_s;
        let (count, skipped) = (f64::from(micro_batches), f64::from(max_in_flight - 1));
        let min_skipped = f64::from(min_in_flight - 1);
        let is_alternating = micro_batches > max_in_flight; // else all forwards come before all backwards

        let (first_s, last_s, trip_s) = (below(self.first_back_s), below(self.last_back_s), below(self.trip_s));
        let first_back_s = (first_s + work_s).max((min_skipped + 1.0) * forward_s + backward_s);
        let last_back_s = (last_s + work_s).max(forward_s + (min_skipped + 1.0) * backward_s);
        let last_synced_s = (forward_s + transfer_s + self.last_synced_s).max(last_back_s + grad_reduce_s);

        // The new stage is busy all the time.
        let wait_first_s = (first_s - skipped * forward_s).max(0.0);
        let mut wait_s = wait_first_s.max(last_s - skipped * backward_s);
        let mut waits_s = wait_s;
        let mut last_start_s = (count - 1.0) * forward_s;
        if is_alternating {
            last_start_s += (count - skipped - 1.0) * backward_s + wait_first_s;
            wait_s = wait_s.max(first_s + last_s - skipped * work_s);
            let between = f64::from((micro_batches - 1) / max_in_flight - 1);
            waits_s = wait_s.max(first_s + last_s - skipped * work_s + between * (trip_s - skipped * work_s).max(0.0));
        }
        // The link below it is, but for waits for round trips, each in place of the messages of a window.
        let max_in_flights = f64::from((micro_batches - 1) / max_in_flight);
        let trips_s = max_in_flights * (trip_s + work_s - f64::from(max_in_flight) * link_s).max(0.0);
        let link_start_s = forward_s + count * link_s + latency_s + trips_s;
        // The stage below it is, and loops: the q-th from B((q - 1) (1 + difference)), the last to F(M - 1).
        let difference = max_in_flight.saturating_sub(next_max_in_flight);
        let loops = if is_alternating { (micro_batches - 1 - max_in_flight) / (difference + 1) + 1 } else { 0 };
        let loops_s = f64::from(loops) * (below(work_s) - f64::from(difference) * self.work_s).max(0.0);
        let next_start_s = forward_s + transfer_s + self.last_start_s + loops_s;

        // A stage further below is, but for its first forwards and last backwards.
        let below_us = Middle {
            through_s: below(self.middle.through_s) + work_s,
            ends: self.middle.ends,
            forward_s: self.middle.forward_s.max(forward_s),
            backward_s: self.middle.backward_s.max(backward_s),
        };
        let ourselves = Middle { through_s: (count - min_skipped) * work_s, ends: min_skipped, forward_s, backward_s };
        let drained_s = (below(self.drained_s) + work_s)
            .max(below_us.path_s())
            .max(count * work_s + waits_s)
            .max(link_start_s + self.trip_s + transfer_s + backward_s)
            .max(below(self.busy_s) + work_s + loops_s);
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
            middle: if below_us.promise_s() > ourselves.promise_s() { below_us } else { ourselves },
        }
    }

    /// Rounds all paths down to multiples of `grid_s`, so that suffixes that hardly differ become equal.
    pub(crate) fn rounded_down(&self, grid_s: f64) -> Self {
        // No path is negative, so this is `floor`, which takes longer.
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
            work_s: self.work_s,
        }
    }
}
