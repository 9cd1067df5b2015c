//! Passes of the label search under rising thresholds.
//!
//! A pass with threshold θ either finds plans whose paths are shorter than θ, or proves that no step is below θ.
//! Section *A pass* of docs/proofs.md derives the bound of a pass that drops labels.

use rayon::prelude::*;

use super::suffix_search::PassResult;
use super::{Search, SizeSearch};
use crate::error::Result;
use crate::planner::effort::{WorkBudget, passes};
use crate::planner::hybrid::{evaluate::candidate_plan::CandidatePlan, placement::packing::Packing};

impl Search<'_> {
    /// Simulates the best packed plans, to have a first plan.
    pub(crate) fn start(&mut self) -> Result<()> {
        let control = self.control;
        let packed: Vec<Vec<CandidatePlan>> =
            (self.sizes.par_iter()).map(|size| Packing::new(&size.suffixes.task).plans(control)).collect();
        let mut plans = Vec::new();
        for plan in packed.into_iter().flatten() {
            // Neither the largest nor the smallest numbers in flight are always best, so both variants of a plan
            // compete.
            plans.extend(self.with_max_in_flights(&plan)?);
        }
        plans.sort_by(|a, b| a.0.total_cmp(&b.0));
        plans.truncate(passes::FIRST_SIMULATED);
        self.simulate(plans, self.effort.actions)
    }

    /// Runs narrow passes under rising thresholds until one of them finds a plan.
    pub(crate) fn reach(&mut self) -> Result<()> {
        let min_s = self.searched_bound_s();
        if self.step_s() <= passes::REACH[1] * min_s {
            return Ok(()); // the plan is near the bound, so the first pass of a proof finds any better plan
        }
        // A low threshold drops most labels, so start just above the bound and raise it only if nothing was found.
        for reach in passes::REACH {
            let limit_s = (min_s * reach).min(self.step_s());
            self.pass(limit_s, passes::BEAMS[0])?;
            if self.step_s() <= limit_s || self.must_end() {
                break;
            }
        }
        Ok(())
    }

    /// Runs complete passes under rising thresholds until the bound reaches the step or a limit is reached.
    pub(crate) fn prove(&mut self) -> Result<()> {
        if !self.is_proved() {
            // A narrow pass first: each better plan that it finds lowers the thresholds of the expensive complete
            // passes.
            self.pass(self.step_s(), passes::BEAMS[1])?;
        }
        while !(self.is_proved() || self.must_end()) {
            let step_s = self.step_s();
            let open = self.sizes.iter().filter(|size| size.bound_s.max(size.searched_s) < step_s);
            let searched_s = open.map(|size| size.searched_s.max(size.bound_s)).fold(step_s, f64::min);
            // The threshold rises by a part of the gap, not at once to the step. Low thresholds take little work, and
            // what they prove remains proved if a later pass is interrupted.
            let rise_s = (passes::RISE * (step_s - searched_s)).max(passes::MIN_RISE * step_s);
            // Without any plan there is no step to approach, so the pass gets no threshold.
            let limit_s = if step_s.is_finite() { step_s.min(searched_s + rise_s) } else { step_s };
            self.pass(limit_s, usize::MAX)?;
        }
        Ok(())
    }

    /// Runs a last pass with a finer grid if rounding may be what keeps the bound below the step. It takes at most as
    /// much work as all passes so far.
    pub(crate) fn sharpen(&mut self) -> Result<()> {
        let is_rounded = self.sizes.iter().any(|size| size.suffixes.task.cluster.devices() > passes::EXACT_DEVICES);
        let is_open = self.searched_bound_s() < self.step_s() && self.is_proved();
        if !(is_rounded && is_open) || self.must_end() {
            return Ok(());
        }
        let work_of_pass = self.effort.work_of_pass.min(self.work);
        self.effort = WorkBudget { grid: passes::FINE_GRID, work_of_pass, ..self.effort };
        // Passes with the coarse grid have searched up to the step, which would make the finer pass skip every size.
        let searched: Vec<f64> = self.sizes.iter_mut().map(|size| std::mem::take(&mut size.searched_s)).collect();
        let outcome = self.pass(self.step_s(), usize::MAX);
        for (size, searched_s) in self.sizes.iter_mut().zip(searched) {
            size.searched_s = size.searched_s.max(searched_s);
        }
        outcome
    }

    /// Runs one pass over all sizes whose bound is below `limit_s`, simulates the best plans found, and improves a new
    /// best plan by local search.
    pub(crate) fn pass(&mut self, limit_s: f64, beam: usize) -> Result<()> {
        let control = self.control;
        let is_open = |size: &SizeSearch<'_>| size.bound_s < limit_s && size.searched_s < limit_s;
        let open = self.sizes.iter().filter(|size| is_open(size)).count() as u64;
        // Sizes run in parallel, but each has its own fixed part of the work, so the result does not depend on threads.
        let effort = self.effort.shared_out(self.labels, self.work, open);
        let found: Vec<Option<PassResult>> = (self.sizes.par_iter_mut())
            .map(|size| {
                let is_open = is_open(size) && !control.should_stop();
                is_open.then(|| size.suffixes.pass(limit_s, beam, effort, control))
            })
            .collect();
        let mut plans = Vec::new();
        for (size, found) in self.sizes.iter_mut().zip(found) {
            let Some(found) = found else { continue };
            let shortest_s = found.plans.first().map_or(f64::INFINITY, |(path_s, _)| *path_s);
            // Path lengths are lower bounds on steps. So the bound is the shortest path among plans found and labels
            // left over, at most the threshold.
            size.bound_s = size.bound_s.max(shortest_s.min(found.bound_s).min(limit_s));
            size.searched_s = size.searched_s.max(found.bound_s.min(limit_s));
            self.labels += found.labels;
            self.work += found.work;
            plans.extend(found.plans.into_iter().take(passes::SIMULATED));
        }
        let before_s = self.step_s();
        self.simulate(plans, effort.actions)?;
        if self.step_s() < before_s {
            self.improve();
        }
        self.report();
        Ok(())
    }

    /// Simulates plans, shortest paths first, until their paths reach the best step or `actions` actions have been
    /// simulated.
    pub(crate) fn simulate(&mut self, mut plans: Vec<(f64, CandidatePlan)>, actions: u64) -> Result<()> {
        plans.sort_by(|a, b| a.0.total_cmp(&b.0));
        let until = self.evaluator.actions + actions;
        for (path_s, plan) in plans {
            // While there is no plan at all, limits are ignored: any plan is better than an error.
            let is_late = self.control.should_stop() || self.evaluator.actions >= until;
            // A path bounds the step from below, and plans are sorted, so no later plan can beat the best one.
            if path_s >= self.step_s() || (self.best.is_some() && is_late) {
                break;
            }
            if !self.seen.insert(plan.clone()) {
                continue;
            }
            let evaluated = self.evaluator.evaluate(&plan)?;
            if evaluated.step_s < self.step_s() {
                self.best = Some((evaluated.step_s, plan));
            }
        }
        Ok(())
    }
}
