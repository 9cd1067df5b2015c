//! Stages that end at one cut, before they are placed. Their times, all-reduce tails and maximum numbers of
//! micro-batches in flight are computed once for all labels at this cut.

use std::rc::Rc;
use std::sync::Arc;

use crate::cost::{self, Passes, ShardMessages};
use crate::planner::effort::work;
use crate::planner::hybrid::{
    bounds::nested_stages::{Inner, Synced},
    evaluate::stage_memory::Fitting,
    placement::placement_space::PlacementMove,
    subproblem::Subproblem,
};

/// A stage between two cuts, before it is placed.
pub(crate) struct Stage {
    pub begin: usize,
    /// Position of `begin` in [`crate::cost::LayerSums::begins`].
    pub index: usize,
    pub forward_s: f64,
    /// Backward with a repeated forward if all stages recompute their activations. Without it if some may.
    pub backward_s: f64,
}

/// Largest numbers of micro-batches in flight that fit, and messages, of a stage at a ZeRO stage.
pub(crate) type AtZeroStage = (Fitting, ShardMessages);

/// Returns what a stage may have in flight and sends at the lowest ZeRO stage of `each` that fits with `fewest`
/// micro-batches in flight. `None` if none fits.
pub(crate) fn lowest_that_fits(each: &[AtZeroStage], fewest: u32, is_real: bool) -> Option<AtZeroStage> {
    let &(fitting, messages) = each.iter().find(|(fitting, _)| fitting.max() >= fewest)?;
    // In a relaxed space, devices may have less memory than it knows, and so a higher ZeRO stage, at which more
    // micro-batches fit.
    let fitting = if is_real { fitting } else { each.last()?.0 };
    Some((fitting, messages))
}

/// Stages that end at one cut, on devices with equal costs.
struct StageClass<'t> {
    /// Stages that compute for less than the threshold.
    short: Rc<[Stage]>,
    /// All-reduce tails of the stages on each kind of the devices alone.
    sync: Vec<(Passes<'t>, Synced<'t>)>,
    /// Largest numbers of micro-batches in flight that fit for each stage, and its messages, at each ZeRO stage that it
    /// may take. `None` if not computed yet.
    fitting: Vec<Option<Box<[AtZeroStage]>>>,
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
            let (forward_s, once_s) = totals.longest_s(choice.pace, (begin, end));
            let backward_s = once_s + (task.recompute.min_forwards() - 1.0) * forward_s;
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
            fitting: vec![None; short.len()],
            short: short.into(),
            sync: (totals.passes(choice.pace))
                .map(|passes| (passes, Synced::new(task.model, passes, choice.sync, overlap, end)))
                .collect(),
        };
        self.of_cost_class[at].insert(stages).short.clone()
    }

    /// Returns the exposed all-reduce time of the stage at index `at` of [`StagesByEnd::short`], and for each ZeRO
    /// stage that it may take, in rising order, its largest numbers of micro-batches in flight that fit, and its messages.
    pub(crate) fn sync_and_fitting(
        &mut self,
        choice: &PlacementMove,
        at: usize,
        work: &mut u64,
    ) -> (f64, &[AtZeroStage]) {
        let (task, end) = (self.task, self.end);
        let Some(stages) = &mut self.of_cost_class[choice.cost_class as usize] else {
            return (0.0, &[]);
        };
        if self.inner.is_none() {
            self.inner = task.sets.as_ref().map(|sets| sets.inner(end));
        }
        let Stage { begin, index, .. } = stages.short[at];
        // Memory is checked lazily, because stages that are dropped by their times never need it.
        let fitting = &**stages.fitting[at].get_or_insert_with(|| {
            *work += work::FIT_STAGE;
            let Some(totals_index) = task.totals_index[choice.replicas as usize] else { return Box::default() };
            let totals = &task.totals[totals_index as usize];
            let capacity_bytes = choice.memory_bytes - task.settings.memory.reserved_bytes;
            let (options, overlap) = (&task.settings.memory, task.settings.overlap_sync);
            let at = |zero_stage: u8| {
                let memory = task.memory_at(zero_stage, totals, (begin, end), choice.replicas);
                let options = options.at_zero_stage(zero_stage);
                let messages = ShardMessages::new(task.model, &options, (begin, end), choice.sync, overlap);
                (memory.fitting(task.micro_batches, capacity_bytes), messages)
            };
            (options.zero_stage..=options.max_zero_stage).map(at).collect()
        });
        let inner = self.inner.as_deref();
        if let [(_, only)] = &mut stages.sync[..] {
            return (only.sum(index, inner), fitting);
        }
        let of_kinds: Vec<(f64, f64)> = (stages.sync.iter_mut())
            .map(|(passes, sync)| (passes.backward_between_s((begin, end)), sync.sum(index, inner)))
            .collect();
        (cost::exposed_s(of_kinds.into_iter(), task.settings.overlap_sync), fitting)
    }
}
