//! The step of a pipeline under 1F1B from what its stages take alone: the sweep of [`crate::simulate`] for this one
//! family, without a list of actions.
//!
//! Forward `i` of a stage stands behind its forward `i - 1` and, once the window of `w` is full, behind its backward
//! `i - w`. Where windows never grow along the stages, each action comes behind all that it needs in this order:
//!
//! ```text
//! for each i    backward i - w of every stage that has one, last stage first; then forward i of all, first stage first
//! at the end    the other backwards, last stage first
//! ```

use crate::planner::hybrid::bounds::paths::PathStage;
use crate::schedule::LONGEST_S;

/// Simulates pipelines of 1F1B, eager 1F1B and GPipe. Keeps its memory between calls.
#[derive(Debug, Default)]
pub(crate) struct PipelineSimulator {
    lanes: Vec<RankCursor>,
    /// Arrival of the gradient of each micro-batch at each stage.
    returned_s: Vec<f64>,
}

/// Progress of one stage.
#[derive(Debug, Clone, Copy)]
struct RankCursor {
    stage: PathStage,
    /// Times from which on the stage, its link to the next stage, and the way back of that link are free.
    free_s: f64,
    there_s: f64,
    back_s: f64,
}

impl PipelineSimulator {
    /// Returns the step, gradient reduction included. Returns `None` where numbers in flight grow along the stages or a
    /// time is invalid: [`crate::simulate::Sweep`] has the error for these.
    pub(crate) fn step_s(&mut self, stages: impl Iterator<Item = PathStage>, micro_batches: u32) -> Option<f64> {
        self.lanes.clear();
        self.lanes.extend(stages.map(|stage| RankCursor {
            stage: PathStage { max_in_flight: stage.max_in_flight.clamp(1, micro_batches), ..stage },
            free_s: 0.0,
            there_s: 0.0,
            back_s: 0.0,
        }));
        let is_time = |time_s: f64| (0.0..=LONGEST_S).contains(&time_s);
        let is_sound = |PathStage { forward_s, backward_s, grad_reduce_s, busy_s, latency_s, .. }: PathStage| {
            [forward_s, backward_s, grad_reduce_s, busy_s, latency_s].into_iter().all(is_time)
        };
        if self.lanes.windows(2).any(|two| two[0].stage.max_in_flight < two[1].stage.max_in_flight)
            || !self.lanes.iter().all(|lane| is_sound(lane.stage))
        {
            return None;
        }
        let stages = self.lanes.len();
        self.returned_s.clear();
        self.returned_s.resize(stages * micro_batches as usize, 0.0);
        for forward in 0..micro_batches {
            for at in (0..stages).rev() {
                if let Some(backward) = forward.checked_sub(self.lanes[at].stage.max_in_flight) {
                    self.backward(at, backward as usize * stages);
                }
            }
            let mut arrived_s: f64 = 0.0;
            for lane in &mut self.lanes {
                lane.free_s = lane.free_s.max(arrived_s) + lane.stage.forward_s;
                lane.there_s = lane.there_s.max(lane.free_s) + lane.stage.busy_s;
                arrived_s = lane.there_s + lane.stage.latency_s;
            }
        }
        for at in (0..stages).rev() {
            for backward in micro_batches - self.lanes[at].stage.max_in_flight..micro_batches {
                self.backward(at, backward as usize * stages);
            }
        }
        Some(self.lanes.iter().map(|lane| lane.free_s + lane.stage.grad_reduce_s).fold(0.0, f64::max))
    }

    /// Runs the next backward of a stage. The arrivals of its micro-batch are stored from `row` on.
    #[inline]
    fn backward(&mut self, at: usize, row: usize) {
        let lane = &mut self.lanes[at];
        // Behind the last stage its own forward is all that it waits for.
        lane.free_s = lane.free_s.max(self.returned_s[row + at]) + lane.stage.backward_s;
        let end_s = lane.free_s;
        if at > 0 {
            let front = &mut self.lanes[at - 1];
            front.back_s = front.back_s.max(end_s) + front.stage.busy_s;
            self.returned_s[row + at - 1] = front.back_s + front.stage.latency_s;
        }
    }
}
