//! Good plans on any placement before anything is proved: plans by pattern, improved by annealing.

use crate::planner::effort::{
    WHOLE,
    annealing::{self, AnnealingTime},
    passes, placement,
};
use crate::planner::hybrid::{
    Search, SearchResult,
    evaluate::candidate_plan::CandidatePlan,
    placement::{cut_row, patterns::Patterns},
    search::{
        SizeSearch,
        annealing::{Annealer, Walk},
        local_search, min_steps_s,
        suffix_search::RelaxedPlan,
        unscheduled_plan::{PlanScorer, UnscheduledPlan},
    },
    settings::Settings,
    subproblem::Subproblem,
};
use rayon::prelude::*;

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::Result;

/// Returns the best plan that patterns and annealing find, on any placement, without a bound.
///
/// # Errors
/// Returns the errors of [`crate::planner::hybrid::plan`].
pub fn draft(model: &LayerSums, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<SearchResult> {
    settings.check()?;
    cluster.check()?;
    let mut search = Search::new(model, cluster, settings, WHOLE, control);
    search.anneal(annealing::LONG)?;
    search.answer()
}

impl<'a> Search<'a> {
    /// Tries pattern plans: first a few, and then all of them unless the first ones are near the bound.
    pub(crate) fn try_patterns(&mut self) -> Result<()> {
        self.with_sizes(|search, sizes| {
            let bounds = search.try_patterns_for(sizes)?;
            search.take_bounds(sizes, &bounds);
            Ok(())
        })
    }

    /// Anneals the pattern plans and the best plan so far.
    pub(crate) fn anneal(&mut self, time: AnnealingTime) -> Result<()> {
        let near_s = passes::NEAR * self.lower_bound_s();
        self.with_sizes(|search, sizes| search.anneal_for(sizes, time, near_s))
    }

    /// Places the shortest plans of the relaxed space on the lists of devices of the patterns, and simulates them.
    pub(crate) fn place_relaxed_plans(&mut self) -> Result<()> {
        self.with_sizes(|search, sizes| {
            // Plans of the relaxed space have cuts and replicas but no devices. Passes leave them behind when they end.
            let relaxed_plans: Vec<Vec<RelaxedPlan>> =
                sizes.iter_mut().map(|size| std::mem::take(&mut size.suffixes.relaxed_plans)).collect();
            search.place_relaxed_plans_of(sizes, &relaxed_plans)
        })
    }

    /// Takes the micro-batch sizes out of the search while `work` reads them and adds plans. Afterwards improves a new
    /// best plan by local search, and reports it.
    pub(super) fn with_sizes(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Vec<SizeSearch<'a>>) -> Result<()>,
    ) -> Result<()> {
        let before_s = self.step_s();
        let mut sizes = std::mem::take(&mut self.sizes);
        let outcome = work(self, &mut sizes);
        self.sizes = sizes;
        outcome?;
        if self.step_s() < before_s {
            self.improve();
        }
        self.report();
        Ok(())
    }

    /// Tries patterns, and returns the bounds of all sizes with their work if it computed any.
    fn try_patterns_for(&mut self, sizes: &[SizeSearch<'_>]) -> Result<Vec<(f64, u64)>> {
        let tasks: Vec<&Subproblem<'_>> = sizes.iter().map(|size| &size.suffixes.task).collect();
        let Some(line) = line_of(&tasks) else { return Ok(Vec::new()) };
        let Some(patterns) = Patterns::new(&tasks, &line) else { return Ok(Vec::new()) };
        let mut bounds = Vec::new();
        for is_brief in [true, false] {
            // Once there is a plan, most patterns are dropped by their bounds, so the few first patterns save most
            // time.
            let pattern_plans = patterns.plans(self.step_s(), 1.0, is_brief, self.control);
            self.simulate_unscheduled(&tasks, pattern_plans.iter().take(annealing::PATTERNS_SIMULATED))?;
            self.pattern_plans.splice(0..0, pattern_plans);
            // If tables prove that the plan is near the optimum, further patterns are not worth their time. On
            // clusters with fast links this is the usual case.
            if is_brief && self.best.is_some() {
                bounds = min_steps_s(sizes, self.step_s(), self.control);
                if bounds.iter().all(|(bound_s, _)| passes::NEAR * *bound_s >= self.step_s()) {
                    break;
                }
            }
        }
        Ok(bounds)
    }

    pub(super) fn anneal_for(&mut self, sizes: &[SizeSearch<'_>], time: AnnealingTime, near_s: f64) -> Result<()> {
        let tasks: Vec<&Subproblem<'_>> = sizes.iter().map(|size| &size.suffixes.task).collect();
        let Some(line) = line_of(&tasks) else { return Ok(()) };
        if time.is_wide && !self.has_wide_patterns {
            let Some(patterns) = Patterns::new(&tasks, &line) else { return Ok(()) };
            self.pattern_plans =
                patterns.plans(annealing::WIDE_FACTOR * self.step_s(), annealing::WIDE_FACTOR, false, self.control);
            self.has_wide_patterns = true;
        }
        self.pattern_plans.truncate(annealing::MAX_CHAINS);
        self.settle(&tasks, &line)?;
        self.anneal_repeatedly(&tasks, &line, time, near_s)
    }

    fn place_relaxed_plans_of(&mut self, sizes: &[SizeSearch<'_>], relaxed_plans: &[Vec<RelaxedPlan>]) -> Result<()> {
        let tasks: Vec<&Subproblem<'_>> = sizes.iter().map(|size| &size.suffixes.task).collect();
        let (control, step_s) = (self.control, self.step_s());
        // Relaxed plans with paths of at least the best step cannot become better plans.
        let mut relaxed_plans: Vec<(usize, &RelaxedPlan)> = (relaxed_plans.iter().enumerate())
            .flat_map(|(task, relaxed_plans)| relaxed_plans.iter().map(move |relaxed_plan| (task, relaxed_plan)))
            .filter(|(_, relaxed_plan)| relaxed_plan.path_s < step_s)
            .collect();
        relaxed_plans.sort_by(|a, b| a.1.path_s.total_cmp(&b.1.path_s));
        relaxed_plans.truncate(annealing::PLACED);
        // Without a line of cuts there is no annealer to move the cuts of placed plans.
        let Some(line) = (if relaxed_plans.is_empty() || control.should_stop() { None } else { line_of(&tasks) })
        else {
            return Ok(());
        };
        let Some(patterns) = Patterns::new(&tasks, &line) else { return Ok(()) };
        let Some(annealing) = Annealer::new(&tasks, &line) else { return Ok(()) };
        let mut placed: Vec<(f64, UnscheduledPlan)> = (relaxed_plans.par_iter())
            .flat_map_iter(|&(task, relaxed_plan)| patterns.placed(task, relaxed_plan))
            .map_init(
                || PlanScorer::new(&tasks, tasks[0].cluster, placement::PATTERN_SYNCS),
                |scorer, mut plan| (scorer.score(&mut plan, f64::INFINITY), plan),
            )
            // Placed on real devices, a relaxed plan may lack memory that the relaxed space assumed.
            .filter(|(score, _)| score.overflow == 0.0)
            .map(|(score, plan)| (score.path_s, plan))
            .collect();
        placed.sort_by(|a, b| a.0.total_cmp(&b.0));
        placed.truncate(annealing::PLACED);
        let mut plans: Vec<UnscheduledPlan> = placed.into_iter().map(|(_, plan)| plan).collect();
        self.relaxed_work += annealing.settle(&mut plans, control);
        self.simulate_unscheduled(&tasks, plans.iter())
    }

    /// Moves the cuts of pattern plans until no move shortens the longest path. Runs once per search.
    fn settle(&mut self, tasks: &[&Subproblem<'_>], line: &[u32]) -> Result<()> {
        let Some(annealing) = Annealer::new(tasks, line) else { return Ok(()) };
        let mut pattern_plans = std::mem::take(&mut self.pattern_plans);
        let mut outcome = Ok(());
        if !self.is_settled {
            self.is_settled = true;
            self.annealed_work += annealing.settle(&mut pattern_plans, self.control);
            outcome = self.simulate_unscheduled(tasks, pattern_plans.iter());
        }
        self.pattern_plans = pattern_plans;
        outcome
    }

    /// Anneals repeatedly, each time for as long as all times before together. Ends once the step is at most `near_s`,
    /// or was found in the first half of the work.
    fn anneal_repeatedly(
        &mut self,
        tasks: &[&Subproblem<'_>],
        line: &[u32],
        time: AnnealingTime,
        near_s: f64,
    ) -> Result<()> {
        let Some(annealing) = Annealer::new(tasks, line) else { return Ok(()) };
        let size = tasks[0].model.cuts() as u64 * u64::from(tasks[0].cluster.devices());
        // The effort grows with the problem, but has limits: a large problem gets a fixed time, not a fixed coverage.
        let first = size.saturating_mul(time.of_cut_and_device).min(time.max).min(time.within);
        let all = (time.all * first).min(time.within);
        let (mut effort, control) = (first, self.control);
        let (mut spent, mut helpful) = (0, 0);
        loop {
            // Each round starts again from the patterns and the best plan. Rounds double the total effort, so the
            // choice of the first effort costs at most a factor of two.
            let before_s = self.step_s();
            let best = self.best.as_ref().and_then(|(_, plan)| as_unscheduled(tasks, plan));
            let plans = best.into_iter().chain(self.pattern_plans.iter().cloned()).collect();
            let mut outcome = Ok(());
            annealing.anneal(plans, (effort, self.annealed_work, Walk::WIDE), control, |leaders| {
                outcome = self.simulate_unscheduled(tasks, leaders.iter().take(annealing::ROUND_SIMULATED).copied());
                outcome.is_ok()
            });
            outcome?;
            self.annealed_work += effort;
            spent += effort;
            // A negligible gain does not count as help, or annealing would go on for rounding-sized gains.
            if self.best.is_none() || self.step_s() < before_s * (1.0 - annealing::MIN_HELP) {
                helpful = spent;
            }
            effort = spent.min(all - spent);
            // If the best plan was found well in the first half of the work, doubling it again is unlikely to help.
            if self.step_s() <= near_s
                || 2 * helpful + time.patience * first <= spent
                || effort == 0
                || control.should_stop()
            {
                return Ok(());
            }
        }
    }

    /// Simulates plans with the largest and with the smallest numbers in flight, shortest paths first.
    pub(super) fn simulate_unscheduled<'s>(
        &mut self,
        tasks: &[&Subproblem<'_>],
        unscheduled_plans: impl Iterator<Item = &'s UnscheduledPlan>,
    ) -> Result<()> {
        let mut plans = Vec::new();
        for unscheduled in unscheduled_plans {
            plans.extend(self.with_max_in_flights(&unscheduled.candidate(tasks[unscheduled.task]))?);
        }
        self.simulate(plans, annealing::SIMULATED_ACTIONS.min(self.effort.actions))
    }

    /// Returns the plan with the largest and with the smallest numbers in flight, each with its longest path. Variants
    /// that do not fit are left out.
    pub(crate) fn with_max_in_flights(&mut self, plan: &CandidatePlan) -> Result<Vec<(f64, CandidatePlan)>> {
        let mut plan = plan.clone();
        let stages = self.evaluator.settled(&mut plan)?;
        let mut plans = Vec::new();
        for eager in [true, false] {
            let Some(max_in_flights) = self.evaluator.max_in_flights_of(&stages, plan.micro_batch, eager) else {
                continue;
            };
            let path_s = self.evaluator.path_s(&stages, &max_in_flights, plan.micro_batch);
            plans.push((path_s, plan.clone().with_max_in_flights(&max_in_flights)));
        }
        Ok(plans)
    }

    /// Improves the best plan by local search.
    pub(crate) fn improve(&mut self) {
        let (model, effort, control) = (self.model, self.effort, self.control);
        self.best =
            self.best.take().map(|best| local_search::improve(model, &mut self.evaluator, best, effort, control));
    }
}

/// Returns a line of nested cuts for plans on any placement, or `None` if the settings allow node-aligned plans only.
pub(super) fn line_of(tasks: &[&Subproblem<'_>]) -> Option<Vec<u32>> {
    // A framework that wants equal replicas starts its ranks in the order of the devices, which only compact placements
    // keep.
    let task = tasks.first().filter(|task| !task.settings.equal_replicas)?;
    Some(cut_row::line(task.model, &task.cut_bytes))
}

/// Converts a plan to an unscheduled plan of its micro-batch size. `None` if no size has it.
pub(super) fn as_unscheduled(tasks: &[&Subproblem<'_>], plan: &CandidatePlan) -> Option<UnscheduledPlan> {
    let is_of = |task: &&Subproblem<'_>| {
        task.micro_batch == plan.micro_batch
            && plan.allows_recompute(task.recompute)
            && plan.stages.iter().all(|stage| task.totals_index[stage.replicas() as usize].is_some())
    };
    let task = tasks.iter().position(is_of)?;
    Some(UnscheduledPlan::of(tasks[task].cluster, task, plan))
}
