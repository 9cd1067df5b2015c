//! Ranges of the number of micro-batches in flight that the stages of a plan may have.
//!
//! The number never grows along the stages: a stage that waits for more forwards than the stage before it runs would
//! wait forever.

use crate::error::Result;
use crate::planner::hybrid::{
    evaluate::{candidate_plan::CandidatePlan, plan_cost::PlanEvaluator, stage_cost::StageCost},
    settings::{Settings, max_fitting_in_flight},
};

/// Ranges of all stages: the smallest number in flight that keeps a stage busy, and the largest that memory allows this
/// stage and the stages in front of it.
pub(crate) type Ranges = Vec<(u32, u32)>;

impl PlanEvaluator<'_> {
    /// Returns the largest numbers in flight if `eager`, otherwise the smallest. Returns `None` if a stage does not fit
    /// its devices with the smallest number.
    pub(crate) fn max_in_flights_of(&self, stages: &[StageCost], micro_batch: u32, eager: bool) -> Option<Vec<u32>> {
        let wanted = vec![if eager { u32::MAX } else { 0 }; stages.len()];
        nearest(&self.ranges_of(stages, micro_batch)?, &wanted)
    }

    /// Returns the ranges of a plan. Returns `None` if a stage does not fit with its smallest number in flight.
    ///
    /// # Errors
    /// The errors of [`PlanEvaluator::stages`].
    pub(crate) fn ranges(&mut self, plan: &CandidatePlan) -> Result<Option<Ranges>> {
        let stages = self.stages(plan)?;
        Ok(self.ranges_of(&stages, plan.micro_batch))
    }

    /// Returns the ranges of stages whose costs are known.
    pub(crate) fn ranges_of(&self, stages: &[StageCost], micro_batch: u32) -> Option<Ranges> {
        let fits = stages.iter().map(|stage| |in_flight| stage.fits_with(in_flight));
        ranges(self.settings, self.settings.global_batch / micro_batch, fits)
    }
}

/// Returns the ranges of stages. `stages` has for each one whether it fits with a number in flight. Returns `None` if one
/// does not fit with its smallest number.
pub(crate) fn ranges(
    settings: &Settings,
    micro_batches: u32,
    stages: impl ExactSizeIterator<Item = impl Fn(u32) -> bool>,
) -> Option<Ranges> {
    let from_end = (1..=stages.len() as u32).rev();
    let ranges = stages.zip(from_end).map(|(fits, from_end)| {
        let (min, max) = settings.max_in_flights(from_end, micro_batches);
        max_fitting_in_flight(min, max, fits).map(|fitting| (min, fitting))
    });
    let mut ranges = ranges.collect::<Option<Ranges>>()?;
    // A stage with little memory also limits the stages behind it, since numbers in flight never grow.
    for index in 1..ranges.len() {
        ranges[index].1 = ranges[index].1.min(ranges[index - 1].1);
    }
    ranges.iter().all(|&(min, max)| min <= max).then_some(ranges)
}

/// Returns the numbers in flight nearest to `wanted` that the ranges and the stages behind allow. Returns `None` if no
/// choice is valid.
pub(crate) fn nearest(ranges: &Ranges, wanted: &[u32]) -> Option<Vec<u32>> {
    let mut max_in_flights = vec![0; ranges.len()];
    let mut next = 1;
    // From the last stage to the first: each stage needs at least the number of the stage behind it.
    for (index, &(min, max)) in ranges.iter().enumerate().rev() {
        let min = min.max(next);
        if min > max {
            return None;
        }
        next = wanted[index].clamp(min, max);
        max_in_flights[index] = next;
    }
    Some(max_in_flights)
}

/// Returns every choice of numbers in flight. Returns `None` if there are more than `limit`.
pub(crate) fn every(ranges: &Ranges, limit: usize) -> Option<Vec<Vec<u32>>> {
    // Choices for the stages behind, each from the last stage to the first.
    let mut all: Vec<Vec<u32>> = vec![Vec::new()];
    for &(min, max) in ranges.iter().rev() {
        let mut longer = Vec::new();
        for behind in &all {
            for max_in_flight in min.max(behind.last().copied().unwrap_or(1))..=max {
                if longer.len() == limit {
                    return None;
                }
                longer.push(behind.iter().copied().chain([max_in_flight]).collect());
            }
        }
        all = longer;
    }
    for max_in_flights in &mut all {
        max_in_flights.reverse();
    }
    Some(all)
}
