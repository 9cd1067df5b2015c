//! Fast simulation of 1F1B, eager 1F1B and GPipe from the times of the stages. It gives the step of [`crate::simulate`]
//! for these schedules, without a list of actions.
//!
//! Forward `i` of a stage comes after its forward `i - 1` and, once `w` micro-batches are in flight, after its backward
//! `i - w`. If `w` never grows along the stages, each action comes after all that it waits for in this order:
//!
//! ```text
//! for each i    backward i - w of every stage that has one, last stage first; then forward i of all, first stage first
//! at the end    the other backwards, last stage first
//! ```

use crate::planner::hybrid::bounds::paths::PathStage;
use crate::schedule::MAX_S;

/// Simulator of pipelines under 1F1B, eager 1F1B and GPipe. It keeps its buffers between calls.
#[derive(Debug, Default)]
pub(crate) struct PipelineSimulator {
    cursors: Vec<RankCursor>,
    /// Arrival of the gradient of each micro-batch at each stage.
    returned_s: Vec<f64>,
}

/// Progress of one stage.
#[derive(Debug, Clone, Copy)]
struct RankCursor {
    stage: PathStage,
    /// Time from which on the stage is free.
    free_s: f64,
    /// Time from which on the link to the next stage is free.
    link_free_s: f64,
    /// Time from which on the link from the next stage is free.
    return_link_free_s: f64,
}

impl PipelineSimulator {
    /// Returns the step in seconds, gradient reduction included. Returns `None` if numbers in flight grow along the
    /// stages or a time is invalid: [`crate::simulate::Sweep`] reports the error.
    pub(crate) fn step_s(&mut self, stages: impl Iterator<Item = PathStage>, micro_batches: u32) -> Option<f64> {
        self.cursors.clear();
        self.cursors.extend(stages.map(|stage| RankCursor {
            stage: PathStage { max_in_flight: stage.max_in_flight.clamp(1, micro_batches), ..stage },
            free_s: 0.0,
            link_free_s: 0.0,
            return_link_free_s: 0.0,
        }));
        // The range also excludes NaN.
        let is_time = |time_s: f64| (0.0..=MAX_S).contains(&time_s);
        let is_valid = |PathStage { forward_s, backward_s, grad_reduce_s, busy_s, latency_s, .. }: PathStage| {
            [forward_s, backward_s, grad_reduce_s, busy_s, latency_s].into_iter().all(is_time)
        };
        if self.cursors.windows(2).any(|two| two[0].stage.max_in_flight < two[1].stage.max_in_flight)
            || !self.cursors.iter().all(|cursor| is_valid(cursor.stage))
        {
            return None;
        }
        let stages = self.cursors.len();
        self.returned_s.clear();
        self.returned_s.resize(stages * micro_batches as usize, 0.0);
        for forward in 0..micro_batches {
            for at in (0..stages).rev() {
                if let Some(backward) = forward.checked_sub(self.cursors[at].stage.max_in_flight) {
                    self.backward(at, backward as usize * stages);
                }
            }
            // Forwards from the first stage to the last: each arrival is known before the next stage needs it.
            let mut arrived_s: f64 = 0.0;
            for cursor in &mut self.cursors {
                cursor.free_s = cursor.free_s.max(arrived_s) + cursor.stage.forward_s;
                // A link takes one message after another. The stage goes on while its output travels.
                cursor.link_free_s = cursor.link_free_s.max(cursor.free_s) + cursor.stage.busy_s;
                arrived_s = cursor.link_free_s + cursor.stage.latency_s;
            }
        }
        // After the last forward, each stage still has the backwards of the micro-batches in flight.
        for at in (0..stages).rev() {
            for backward in micro_batches - self.cursors[at].stage.max_in_flight..micro_batches {
                self.backward(at, backward as usize * stages);
            }
        }
        Some(self.cursors.iter().map(|cursor| cursor.free_s + cursor.stage.grad_reduce_s).fold(0.0, f64::max))
    }

    /// Runs the next backward of a stage. `row` is the index of the first arrival of its micro-batch in `returned_s`.
    #[inline]
    fn backward(&mut self, at: usize, row: usize) {
        let cursor = &mut self.cursors[at];
        // The last stage receives no gradient. Its arrival times stay 0, so it waits for its own forward only.
        cursor.free_s = cursor.free_s.max(self.returned_s[row + at]) + cursor.stage.backward_s;
        let end_s = cursor.free_s;
        if at > 0 {
            let front = &mut self.cursors[at - 1];
            front.return_link_free_s = front.return_link_free_s.max(end_s) + front.stage.busy_s;
            self.returned_s[row + at - 1] = front.return_link_free_s + front.stage.latency_s;
        }
    }
}
