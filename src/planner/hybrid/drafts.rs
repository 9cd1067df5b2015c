//! Good plans of any placement before anything is proved: by pattern, and what annealing makes of them.

use super::anneal::{Annealing, CROWD};
use super::patterns::{self, Patterns};
use super::price::Candidate;
use super::settings::Settings;
use super::sketch::Sketch;
use super::task::Task;
use super::{Answer, NEAR, Search, WHOLE, improve};
use crate::control::Control;
use crate::cost::Model;
use crate::cost::network::Cluster;
use crate::error::Result;

/// Plans that are simulated of all patterns, and after a round of annealing.
const OF_PATTERNS: usize = 32;
const OF_ROUND: usize = 8;
/// Actions that are simulated for them at most: a tenth of a second.
const ACTIONS: u64 = 5_000_000;
/// How long annealing takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heat {
    /// At first, for each cut and device and at most, in nanoseconds or so of one thread.
    of_cut_and_device: u64,
    most: u64,
    /// So many times that beyond twice what it took to find the best plan.
    patience: u64,
    /// So many times that all together.
    all: u64,
    /// Whether patterns set out that are no better than what is known.
    is_wide: bool,
}

/// A millisecond or so.
pub(super) const SPARK: Heat = Heat { of_cut_and_device: 2_000, most: 10_000_000, patience: 0, all: 1, is_wide: false };
/// A hundredth of a second on two threads, up to a tenth.
pub(super) const BRIEF: Heat =
    Heat { of_cut_and_device: 10_000, most: 20_000_000, patience: 0, all: 10, is_wide: true };
/// A quarter of a second, up to one.
pub(super) const LONG: Heat =
    Heat { of_cut_and_device: 100_000, most: 200_000_000, patience: 3, all: 10, is_wide: true };
/// Less than this part of the step is no help.
const HELPS: f64 = 1e-3;
/// Patterns whose paths are longer than the best step by this factor set out all the same.
const HOPEFUL: f64 = 2.0;

/// The best plan of any placement by pattern and annealing alone, without a search for better ones or for a bound.
///
/// # Errors
/// As [`super::plan`].
pub fn draft(model: &Model, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<Answer> {
    settings.check()?;
    cluster.check()?;
    let mut search = Search::new(model, cluster, settings, WHOLE, control);
    search.draft(Some(LONG))?;
    search.answer()
}

impl Search<'_> {
    /// Looks for plans of any placement: by pattern, and by annealing if that is asked for.
    pub(super) fn draft(&mut self, heat: Option<Heat>) -> Result<()> {
        let near_s = NEAR * self.lower_bound_s();
        let sizes = std::mem::take(&mut self.sizes);
        let tasks: Vec<&Task<'_>> = sizes.iter().map(|size| &size.suffixes.task).collect();
        let outcome = self.draft_for(&tasks, heat, near_s);
        self.sizes = sizes;
        self.report();
        outcome
    }

    fn draft_for(&mut self, tasks: &[&Task<'_>], heat: Option<Heat>, near_s: f64) -> Result<()> {
        let Some(task) = tasks.first() else { return Ok(()) };
        if task.settings.equal_replicas {
            // A launcher that wants equal replicas starts its ranks in the order of the devices, which only compact
            // placements keep.
            return Ok(());
        }
        let line = patterns::line(task.model, &task.cut_bytes);
        let Some(patterns) = Patterns::new(tasks, &line) else { return Ok(()) };
        let before_s = self.step_s();
        if let Some(heat) = heat {
            if heat.is_wide && !self.is_drawn_wide {
                self.drawn = patterns.plans(HOPEFUL * self.step_s(), HOPEFUL, false, self.control);
                self.is_drawn_wide = true;
            }
            self.drawn.truncate(CROWD);
            self.settle(tasks, &line)?;
            self.anneal(tasks, &line, heat, near_s)?;
        } else {
            // With a plan in hand, most patterns are dropped at once.
            for is_brief in [true, false] {
                let drawn = patterns.plans(self.step_s(), 1.0, is_brief, self.control);
                self.meet(tasks, drawn.iter().take(OF_PATTERNS))?;
                self.drawn.splice(0..0, drawn);
            }
        }
        if self.step_s() < before_s {
            self.improve();
        }
        Ok(())
    }

    /// Moves cuts of patterns until that helps no more.
    fn settle(&mut self, tasks: &[&Task<'_>], line: &[u32]) -> Result<()> {
        let Some(annealing) = Annealing::new(tasks, line) else { return Ok(()) };
        let mut drawn = std::mem::take(&mut self.drawn);
        let mut outcome = Ok(());
        if !self.is_settled {
            self.is_settled = true;
            self.annealed_work += annealing.settle(&mut drawn, self.control);
            outcome = self.meet(tasks, drawn.iter());
        }
        self.drawn = drawn;
        outcome
    }

    /// Anneals anew, each time for as long as all times before together, until the step is no more than `near_s` or was
    /// found in the first half of all that.
    fn anneal(&mut self, tasks: &[&Task<'_>], line: &[u32], heat: Heat, near_s: f64) -> Result<()> {
        let Some(annealing) = Annealing::new(tasks, line) else { return Ok(()) };
        let size = tasks[0].model.cuts() as u64 * u64::from(tasks[0].cluster.devices());
        let first = size.saturating_mul(heat.of_cut_and_device).min(heat.most);
        let (mut effort, control) = (first, self.control);
        let (mut spent, mut helpful) = (0, 0);
        loop {
            let before_s = self.step_s();
            let best = self.best.as_ref().and_then(|(_, plan)| sketched(tasks, plan));
            let plans = best.into_iter().chain(self.drawn.iter().cloned()).collect();
            let mut outcome = Ok(());
            annealing.walk(plans, effort, self.annealed_work, control, |leaders| {
                outcome = self.meet(tasks, leaders.iter().take(OF_ROUND).copied());
                outcome.is_ok()
            });
            outcome?;
            self.annealed_work += effort;
            spent += effort;
            if self.best.is_none() || self.step_s() < before_s * (1.0 - HELPS) {
                helpful = spent;
            }
            effort = spent.min(heat.all * first - spent);
            if self.step_s() <= near_s
                || 2 * helpful + heat.patience * first <= spent
                || effort == 0
                || control.should_stop()
            {
                return Ok(());
            }
        }
    }

    /// Simulates sketches with their windows, shortest paths first.
    fn meet<'s>(&mut self, tasks: &[&Task<'_>], sketches: impl Iterator<Item = &'s Sketch>) -> Result<()> {
        let mut plans = Vec::new();
        for sketch in sketches {
            plans.extend(self.with_windows(&sketch.candidate(tasks[sketch.task]))?);
        }
        self.simulate(plans, ACTIONS.min(self.effort.actions))
    }

    /// A plan whose stages run ahead as far as memory allows, and the same plan with as little of that as keeps them busy,
    /// each with the length of its paths; without what doesn't fit.
    pub(super) fn with_windows(&mut self, plan: &Candidate) -> Result<Vec<(f64, Candidate)>> {
        let stages = self.pricer.stages(plan)?;
        let mut plans = Vec::new();
        for eager in [true, false] {
            let Some(windows) = self.pricer.windows_of(&stages, plan.micro_batch, eager) else { continue };
            let path_s = self.pricer.path_s(&stages, &windows, plan.micro_batch);
            plans.push((path_s, plan.clone().with_windows(&windows)));
        }
        Ok(plans)
    }

    /// Small steps from the best plan so far, while they help.
    pub(super) fn improve(&mut self) {
        let (model, effort, control) = (self.model, self.effort, self.control);
        self.best = self.best.take().map(|best| improve::improve(model, &mut self.pricer, best, effort, control));
    }
}

/// A plan as a sketch for its task.
fn sketched(tasks: &[&Task<'_>], plan: &Candidate) -> Option<Sketch> {
    let is_of = |task: &&Task<'_>| {
        (task.micro_batch, task.recompute) == (plan.micro_batch, plan.recompute)
            && plan.stages.iter().all(|stage| task.share[stage.replicas() as usize].is_some())
    };
    let task = tasks.iter().position(is_of)?;
    Some(Sketch::of(tasks[task].cluster, task, plan))
}
