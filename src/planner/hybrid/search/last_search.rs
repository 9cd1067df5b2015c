//! The last search: annealing around the best plan while a gap to the bound remains.
//!
//! Annealing before the proof looks for a good plan among many, at temperatures at which small gains are lost again. It
//! is short or absent if the first plans are near the bound. This search starts every chain at the best plan, at low
//! temperatures, and also moves layers together with devices and drops stages.

use super::{
    Search, SizeSearch,
    annealing::{Annealer, Walk},
    initial_plans::{as_unscheduled, line_of},
};
use crate::error::Result;
use crate::planner::effort::annealing as limits;
use crate::planner::hybrid::subproblem::Subproblem;

impl Search<'_> {
    /// Anneals the best plan until several walks in a row have found no shorter step.
    ///
    /// It never lengthens the step, and leaves all bounds as they are.
    pub(crate) fn search_around_best(&mut self) -> Result<()> {
        let (mut walks, mut unhelpful) = (0, 0);
        while self.has_gap() && walks < limits::AROUND_WALKS && unhelpful < limits::AROUND_PATIENCE {
            if self.control.should_stop() {
                self.is_cut_short = true;
                return Ok(());
            }
            let before_s = self.step_s();
            // Low temperatures finish what a higher one has begun, and both alone miss plans that the other finds. So
            // walks take turns.
            let first_temperature = limits::AROUND_TEMPERATURES[walks % limits::AROUND_TEMPERATURES.len()];
            let walk = Walk { first_temperature, is_around_best: true };
            self.with_sizes(|search, sizes| search.walk_around_best(sizes, walk))?;
            walks += 1;
            unhelpful = if self.step_s() < before_s { 0 } else { unhelpful + 1 };
        }
        Ok(())
    }

    /// Returns whether there is a plan, and its step is above the bound by more than rounding.
    fn has_gap(&self) -> bool {
        self.best.is_some() && self.step_s() > limits::CLOSED * self.lower_bound_s()
    }

    fn walk_around_best(&mut self, sizes: &[SizeSearch<'_>], walk: Walk) -> Result<()> {
        let tasks: Vec<&Subproblem<'_>> = sizes.iter().map(|size| &size.suffixes.task).collect();
        let Some(line) = line_of(&tasks) else { return Ok(()) };
        let Some(annealing) = Annealer::new(&tasks, &line) else { return Ok(()) };
        let Some(best) = self.best.as_ref().and_then(|(_, plan)| as_unscheduled(&tasks, plan)) else { return Ok(()) };
        let size = tasks[0].model.cuts() as u64 * u64::from(tasks[0].cluster.devices());
        let effort = size.saturating_mul(limits::AROUND_OF_CUT_AND_DEVICE).min(limits::AROUND_MAX);
        // Equal chains differ in their random numbers, which follow from the number of the chain and the work so far.
        let chains = vec![best; limits::AROUND_CHAINS];
        let (seed, control) = (self.annealed_work, self.control);
        let mut outcome = Ok(());
        annealing.anneal(chains, (effort, seed, walk), control, |leaders| {
            outcome = self.simulate_unscheduled(&tasks, leaders.iter().take(limits::ROUND_SIMULATED).copied());
            outcome.is_ok()
        });
        self.annealed_work += effort;
        outcome
    }
}
