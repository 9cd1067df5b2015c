//! Lower bounds on a step, composed stage by stage from the last one backwards.
//!
//! Every path through the graph of actions bounds the simulated step from below. With `t = F + B` of a stage, `c` the
//! transfer to the next stage, `M` micro-batches and `w` forwards of warm-up, these paths are kept of each suffix of
//! the pipeline, measured from the moment at which its first forward starts:
//!
//! ```text
//! trip       first stage: F(i) → down to the last stage → up again → B(i)          one micro-batch, no waiting
//! first_back the same for micro-batch 0, which also waits for w forwards           end of B(0)
//! last_back  the same for micro-batch M-1, which also waits for w backwards        end of B(M-1) from start of F(M-1)
//! drained    end of B(M-1): some stage works on all micro-batches, or a link carries them all, with trips between
//! synced     the end of everything, gradient synchronisation included
//! ```
//!
//! A stage that works on all micro-batches may still wait for round trips: after its F(0) for `first_back` of the
//! stages below (this saves `w - 1` forwards of its own work), before its B(M-1) for `last_back` (saves `w - 1`
//! backwards), and in between for any number of `trip`s (each saves `w - 1` forwards and backwards).

/// Lengths of the paths above, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Paths {
    pub trip_s: f64,
    pub first_back_s: f64,
    pub last_back_s: f64,
    pub drained_s: f64,
    pub synced_s: f64,
}

/// A stage as the paths see it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    pub forward_s: f64,
    pub backward_s: f64,
    pub sync_s: f64,
    pub window: u32,
    /// To the next stage, one way: time on the link, and the delay behind it.
    pub busy_s: f64,
    pub latency_s: f64,
}

impl Paths {
    /// Puts a stage in front of the suffix.
    pub(super) fn extend(&self, stage: &Link, micro_batches: u32) -> Self {
        let Link { forward_s, backward_s, sync_s, window, busy_s, latency_s } = *stage;
        let work_s = forward_s + backward_s;
        let there_and_back_s = 2.0 * (busy_s + latency_s);
        let ahead = f64::from(window - 1);
        let below = |path_s: f64| path_s + there_and_back_s;

        let (first, last, trip) = (below(self.first_back_s), below(self.last_back_s), below(self.trip_s));
        let mut waits_s = 0.0_f64.max(first - ahead * forward_s).max(last - ahead * backward_s);
        if micro_batches > window {
            let between = f64::from((micro_batches - 1) / window - 1);
            waits_s = waits_s.max(first + last - ahead * work_s + between * (trip - ahead * work_s).max(0.0));
        }
        let busy_stage_s = f64::from(micro_batches) * work_s + waits_s;
        let busy_link_s = work_s + f64::from(micro_batches - 1) * busy_s + trip;
        let drained_s = below(self.drained_s + work_s).max(busy_stage_s).max(busy_link_s);
        Self {
            trip_s: trip + work_s,
            first_back_s: (first + work_s).max((ahead + 1.0) * forward_s + backward_s),
            last_back_s: (last + work_s).max(forward_s + (ahead + 1.0) * backward_s),
            drained_s,
            synced_s: (self.synced_s + forward_s + busy_s + latency_s).max(drained_s + sync_s),
        }
    }

    /// Whether no path is longer than `other`'s: then nothing that goes in front can make this suffix the worse one.
    pub(super) fn dominates(&self, other: &Self) -> bool {
        self.synced_s <= other.synced_s
            && self.drained_s <= other.drained_s
            && self.trip_s <= other.trip_s
            && self.first_back_s <= other.first_back_s
            && self.last_back_s <= other.last_back_s
    }
}
