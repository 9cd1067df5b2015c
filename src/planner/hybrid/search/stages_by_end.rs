//! Stages that end at one cut, before they are placed. Their times, all-reduce tails and maximum numbers of
//! micro-batches in flight are computed once for all labels at this cut.

use std::rc::Rc;
use std::sync::Arc;

use crate::cost;
use crate::planner::effort::work;
use crate::planner::hybrid::{
    bounds::nested_stages::{Inner, Synced},
    placement::placement_space::PlacementMove,
    settings::max_fitting_in_flight,
    subproblem::Subproblem,
};

/// A stage between two cuts, before it is placed.
pub(crate) struct Stage {
    pub begin: usize,
    /// Position of `begin` in [`crate::cost::LayerSums::begins`].
    pub index: usize,
    pub forward_s: f64,
    pub backward_s: f64,
}

/// Stages that end at one cut, on devices with equal costs.
struct StageClass<'t> {
    /// Stages that compute for less than the threshold.
    short: Rc<[Stage]>,
    /// All-reduce tails of the stages.
    sync: Synced<'t>,
    /// Largest number of micro-batches in flight that fits for each stage, 0 if none does, `None` if not computed yet.
    largest: Vec<Option<u32>>,
}

/// All stages that end at one cut. Labels at this cut share their costs.
pub(crate) struct StagesByEnd<'t> {
    task: &'t Subproblem<'t>,
    end: usize,
    inner: Option<Arc<Inner>>,
    /// Stage classes, indexed by the cost class of a move.
    of_cost_class: Vec<Option<StageClass<'t>>>,
}

impl<'t> StagesByEnd<'t> {
    pub(crate) fn new(task: &'t Subproblem<'t>, end: usize) -> Self {
        Self { task, end, inner: None, of_cost_class: Vec::new() }
    }

    /// Returns the stages that a move may place and that compute for less than the threshold. Adds the work to `work`.
    pub(crate) fn short(&mut self, choice: &PlacementMove, threshold_s: f64, work: &mut u64) -> Rc<[Stage]> {
        let (task, end, at) = (self.task, self.end, choice.cost_class as usize);
        if self.of_cost_class.len() <= at {
            self.of_cost_class.resize_with(at + 1, || None);
        }
        if let Some(stages) = &self.of_cost_class[at] {
            return stages.short.clone();
        }
        let Some(totals_index) = task.totals_index[choice.replicas as usize] else { return Rc::default() };
        let totals = &task.totals[totals_index as usize];
        let mut short = Vec::new();
        for (index, begin) in task.model.begins(end).enumerate() {
            *work += work::MAKE_STAGE;
            let begin = begin as usize;
            let forward_s = (totals.forward_s[end] - totals.forward_s[begin]) / choice.speed;
            let mut backward_s = (totals.backward_s[end] - totals.backward_s[begin]) / choice.speed;
            if task.recompute {
                backward_s += forward_s;
            }
            // A stage that alone computes for longer than the threshold can't be in a plan below it.
            if f64::from(task.micro_batches) * (forward_s + backward_s) < threshold_s {
                short.push(Stage { begin, index, forward_s, backward_s });
                // In a chain, all further stages contain this one and are longer still. In a graph they need not be
                // nested.
            } else if task.model.is_chain {
                break;
            }
        }
        let overlap = task.settings.overlap_sync;
        let stages = StageClass {
            largest: vec![None; short.len()],
            short: short.into(),
            sync: Synced::new(task.model, totals, choice.sync, choice.speed, overlap, end),
        };
        self.of_cost_class[at].insert(stages).short.clone()
    }

    /// Returns the exposed all-reduce time of the stage at index `at` of [`StagesByEnd::short`], and its largest number
    /// of micro-batches in flight that fits, 0 if none does.
    pub(crate) fn sync_and_max_in_flight(&mut self, choice: &PlacementMove, at: usize, work: &mut u64) -> (f64, u32) {
        let (task, end) = (self.task, self.end);
        let Some(stages) = &mut self.of_cost_class[choice.cost_class as usize] else { return (0.0, 0) };
        if self.inner.is_none() {
            self.inner = task.sets.as_ref().map(|sets| sets.inner(end));
        }
        let Stage { begin, index, .. } = stages.short[at];
        // Memory is checked lazily, because stages that are dropped by their times never need it.
        let largest = *stages.largest[at].get_or_insert_with(|| {
            *work += work::FIT_STAGE;
            let memory = &task.settings.memory;
            let Some(totals_index) = task.totals_index[choice.replicas as usize] else { return 0 };
            let totals = &task.totals[totals_index as usize];
            let held = cost::memory(task.model, totals, memory, (begin, end), choice.replicas, 1, task.recompute);
            let capacity_bytes = choice.memory_bytes - memory.reserved_bytes;
            max_fitting_in_flight(1, task.micro_batches, |max_in_flight| {
                held.bytes_with(max_in_flight) <= capacity_bytes
            })
            .unwrap_or(0)
        });
        (stages.sync.sum(index, self.inner.as_deref()), largest)
    }
}
