//! The windows that the stages of a plan may have, and some of them to choose from.
//!
//! Windows never grow along the stages: a stage that waits for more forwards than the one before it gives would wait
//! for ever.

use super::price::{Candidate, Pricer};
use super::settings::largest_window;
use crate::cost;
use crate::error::Result;

/// For each stage, from the least window that keeps it busy to the largest that memory allows it and those in front.
pub(super) type Ranges = Vec<(u32, u32)>;

impl Pricer<'_> {
    /// The windows of a plan whose stages run ahead as far as memory allows where `eager` says so, else no farther than
    /// they must; `None` if a stage doesn't fit even then.
    ///
    /// # Errors
    /// As [`Pricer::stages`].
    pub fn windows(&mut self, plan: &Candidate, eager: &[bool]) -> Result<Option<Vec<u32>>> {
        let wanted: Vec<u32> = eager.iter().map(|&eager| if eager { u32::MAX } else { 0 }).collect();
        Ok(self.ranges(plan)?.and_then(|ranges| nearest(&ranges, &wanted)))
    }

    /// The windows to choose from; `None` if a stage doesn't fit with the least.
    ///
    /// # Errors
    /// As [`Pricer::stages`].
    pub(super) fn ranges(&mut self, plan: &Candidate) -> Result<Option<Ranges>> {
        let settings = self.settings;
        let micro_batches = settings.global_batch / plan.micro_batch;
        let prices = self.stages(plan)?;
        let ranges = (plan.stages.iter().zip(&prices).zip((1..=plan.stages.len() as u32).rev())).map(
            |((stage, price), from_end)| {
                let (least, most) = settings.windows(from_end, micro_batches);
                let totals = &self.totals[&price.share];
                let bytes = |window| {
                    let (ends, replicas) = ((stage.begin, stage.end), stage.replicas());
                    cost::memory(self.model, totals, &settings.memory, ends, replicas, window, plan.recompute)
                        .total_bytes()
                };
                largest_window(least, most, |window| bytes(window) <= price.capacity_bytes)
                    .map(|largest| (least, largest))
            },
        );
        let Some(mut ranges) = ranges.collect::<Option<Ranges>>() else { return Ok(None) };
        // No stage may run ahead farther than one in front of it.
        for index in 1..ranges.len() {
            ranges[index].1 = ranges[index].1.min(ranges[index - 1].1);
        }
        Ok(ranges.iter().all(|&(least, most)| least <= most).then_some(ranges))
    }
}

/// As many micro-batches in flight as wanted, or as near to that as the ranges and the stages behind allow.
pub(super) fn nearest(ranges: &Ranges, wanted: &[u32]) -> Option<Vec<u32>> {
    let mut windows = vec![0; ranges.len()];
    let mut next = 1;
    for (index, &(least, most)) in ranges.iter().enumerate().rev() {
        let least = least.max(next);
        if least > most {
            return None;
        }
        next = wanted[index].clamp(least, most);
        windows[index] = next;
    }
    Some(windows)
}

/// Every choice of windows, if there are no more than `limit`.
pub(super) fn every(ranges: &Ranges, limit: usize) -> Option<Vec<Vec<u32>>> {
    let mut all: Vec<Vec<u32>> = vec![Vec::new()]; // of the stages behind, last stage first
    for &(least, most) in ranges.iter().rev() {
        let mut longer = Vec::new();
        for behind in &all {
            for window in least.max(behind.last().copied().unwrap_or(1))..=most {
                if longer.len() == limit {
                    return None;
                }
                longer.push(behind.iter().copied().chain([window]).collect());
            }
        }
        all = longer;
    }
    for windows in &mut all {
        windows.reverse();
    }
    Some(all)
}
