//! Good plans of any placement before anything is proved: by pattern, and what annealing makes of them.

use super::anneal::{Annealing, CROWD};
use super::patterns::{self, Patterns};
use super::price::Candidate;
use super::settings::Settings;
use super::sketch::Sketch;
use super::task::Task;
use super::{Answer, Search, WHOLE, improve};
use crate::control::Control;
use crate::cost::Model;
use crate::cost::network::Cluster;
use crate::error::Result;

/// Plans that are simulated of all patterns, and after a round of annealing.
const OF_PATTERNS: usize = 32;
const OF_ROUND: usize = 8;
/// Actions that are simulated for them at most: a tenth of a second.
const ACTIONS: u64 = 5_000_000;
/// How long annealing takes for each cut and device, and at most, in nanoseconds or so of one thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heat {
    of_cut_and_device: u64,
    most: u64,
}

/// A few milliseconds.
pub(super) const SPARK: Heat = Heat { of_cut_and_device: 2_000, most: 10_000_000 };
/// A tenth of a second on two threads.
pub(super) const BRIEF: Heat = Heat { of_cut_and_device: 100_000, most: 200_000_000 };
/// Two seconds.
pub(super) const LONG: Heat = Heat { of_cut_and_device: 1_500_000, most: 4_000_000_000 };
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
        let sizes = std::mem::take(&mut self.sizes);
        let tasks: Vec<&Task<'_>> = sizes.iter().map(|size| &size.suffixes.task).collect();
        let outcome = self.draft_for(&tasks, heat);
        self.sizes = sizes;
        self.report();
        outcome
    }

    fn draft_for(&mut self, tasks: &[&Task<'_>], heat: Option<Heat>) -> Result<()> {
        let Some(task) = tasks.first() else { return Ok(()) };
        if task.settings.equal_replicas {
            // A launcher that wants equal replicas starts its ranks in the order of the devices, which only compact
            // placements keep.
            return Ok(());
        }
        let line = patterns::line(task.model, &task.cut_bytes);
        let Some(patterns) = Patterns::new(tasks, &line) else { return Ok(()) };
        let before_s = self.step_s();
        if self.best.is_none() {
            // With a plan in hand, most patterns are dropped at once.
            let drawn = patterns.plans(f64::INFINITY, true, self.control);
            self.meet(tasks, drawn.iter().take(OF_PATTERNS))?;
        }
        if let Some(heat) = heat {
            if self.drawn.is_empty() {
                self.drawn = patterns.plans(HOPEFUL * self.step_s(), false, self.control);
                self.drawn.truncate(CROWD);
            }
            let best = self.best.as_ref().and_then(|(_, plan)| sketched(tasks, plan));
            self.anneal(tasks, &line, best.into_iter().chain(self.drawn.clone()).collect(), heat)?;
        } else {
            let drawn = patterns.plans(self.step_s(), false, self.control);
            self.meet(tasks, drawn.iter().take(OF_PATTERNS))?;
        }
        if self.step_s() < before_s {
            self.improve();
        }
        Ok(())
    }

    fn anneal(&mut self, tasks: &[&Task<'_>], line: &[u32], plans: Vec<Sketch>, heat: Heat) -> Result<()> {
        let Some(annealing) = Annealing::new(tasks, line) else { return Ok(()) };
        let size = tasks[0].model.cuts() as u64 * u64::from(tasks[0].cluster.devices());
        let effort = size.saturating_mul(heat.of_cut_and_device).min(heat.most);
        let mut outcome = Ok(());
        let control = self.control;
        self.annealed_work += effort;
        annealing.walk(plans, effort, control, |leaders| {
            outcome = self.meet(tasks, leaders.iter().take(OF_ROUND).copied());
            outcome.is_ok()
        });
        outcome
    }

    /// Simulates sketches with their windows, shortest paths first.
    fn meet<'s>(&mut self, tasks: &[&Task<'_>], sketches: impl Iterator<Item = &'s Sketch>) -> Result<()> {
        let mut plans = Vec::new();
        for sketch in sketches {
            plans.extend(self.with_windows(&sketch.candidate(tasks[sketch.task]))?);
        }
        self.simulate(plans, ACTIONS)
    }

    /// A plan whose stages run ahead as far as memory allows, and the same plan with as little of that as keeps them busy,
    /// each with the length of its paths; without what doesn't fit.
    pub(super) fn with_windows(&mut self, plan: &Candidate) -> Result<Vec<(f64, Candidate)>> {
        let mut plans = Vec::new();
        for eager in [true, false] {
            let mut plan = plan.clone();
            let Some(windows) = self.pricer.windows(&plan, &vec![eager; plan.stages.len()])? else { continue };
            plan.stages.iter_mut().zip(windows).for_each(|(stage, window)| stage.window = window);
            plans.push((self.pricer.path_s(&plan)?, plan));
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
