//! The numbers of micro-batches in flight that the stages of a plan may have.
//!
//! They never grow along the stages: a stage that waits for more forwards than the one before it gives would wait forever.

use crate::cost::Memory;
use crate::error::Result;
use crate::planner::hybrid::{
    evaluate::{candidate_plan::CandidatePlan, plan_cost::PlanEvaluator, stage_cost::StageCost},
    settings::{Settings, largest_max_in_flight},
};

/// For each stage, the smallest number in flight that keeps it busy, and the largest that memory allows it and the
/// stages in front.
pub(crate) type Ranges = Vec<(u32, u32)>;

impl PlanEvaluator<'_> {
    /// Returns the largest numbers in flight if `eager`, otherwise the smallest. Returns `None` if a stage does not fit
    /// with the smallest.
    pub(crate) fn max_in_flights_of(&self, stages: &[StageCost], micro_batch: u32, eager: bool) -> Option<Vec<u32>> {
        let wanted = vec![if eager { u32::MAX } else { 0 }; stages.len()];
        nearest(&self.ranges_of(stages, micro_batch)?, &wanted)
    }

    /// Returns the ranges of a plan. Returns `None` if a stage does not fit with its smallest number in flight.
    ///
    /// # Errors
    /// As [`PlanEvaluator::stages`].
    pub(crate) fn ranges(&mut self, plan: &CandidatePlan) -> Result<Option<Ranges>> {
        let stages = self.stages(plan)?;
        Ok(self.ranges_of(&stages, plan.micro_batch))
    }

    /// Returns the ranges of stages whose costs are known.
    pub(crate) fn ranges_of(&self, stages: &[StageCost], micro_batch: u32) -> Option<Ranges> {
        let held = stages.iter().map(|stage| (&stage.memory, stage.capacity_bytes));
        ranges(self.settings, self.settings.global_batch / micro_batch, held)
    }
}

/// Returns the ranges of stages with these memories and capacities. Returns `None` if one does not fit with its
/// smallest number in flight.
pub(crate) fn ranges<'m>(
    settings: &Settings,
    micro_batches: u32,
    stages: impl ExactSizeIterator<Item = (&'m Memory, f64)>,
) -> Option<Ranges> {
    let from_end = (1..=stages.len() as u32).rev();
    let ranges = stages.zip(from_end).map(|((memory, capacity_bytes), from_end)| {
        let (least, most) = settings.max_in_flights(from_end, micro_batches);
        largest_max_in_flight(least, most, |max_in_flight| memory.bytes_with(max_in_flight) <= capacity_bytes)
            .map(|largest| (least, largest))
    });
    let mut ranges = ranges.collect::<Option<Ranges>>()?;
    // No stage may run ahead farther than one in front of it.
    for index in 1..ranges.len() {
        ranges[index].1 = ranges[index].1.min(ranges[index - 1].1);
    }
    ranges.iter().all(|&(least, most)| least <= most).then_some(ranges)
}

/// Returns the numbers in flight nearest to `wanted` that the ranges and the stages behind allow.
pub(crate) fn nearest(ranges: &Ranges, wanted: &[u32]) -> Option<Vec<u32>> {
    let mut max_in_flights = vec![0; ranges.len()];
    let mut next = 1;
    for (index, &(least, most)) in ranges.iter().enumerate().rev() {
        let least = least.max(next);
        if least > most {
            return None;
        }
        next = wanted[index].clamp(least, most);
        max_in_flights[index] = next;
    }
    Some(max_in_flights)
}

/// Returns every choice of numbers in flight. Returns `None` if there are more than `limit`.
pub(crate) fn every(ranges: &Ranges, limit: usize) -> Option<Vec<Vec<u32>>> {
    let mut all: Vec<Vec<u32>> = vec![Vec::new()]; // of the stages behind, last stage first
    for &(least, most) in ranges.iter().rev() {
        let mut longer = Vec::new();
        for behind in &all {
            for max_in_flight in least.max(behind.last().copied().unwrap_or(1))..=most {
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
