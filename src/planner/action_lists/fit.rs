//! Fits a schedule to stages with known costs: its activation limit and, for families that use durations, its order.

use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::{Settings, StageCost};
use rustc_hash::FxHashMap;

use super::bound::any_order;
use super::run::{CostCache, Peaks, Run, durations, footprints, run};
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::schedule::{Family, Request, Schedule, family};
use crate::simulate::Sweep;

/// Runs stages under a schedule.
///
/// If the schedule splits backward passes, activations are held until the weight gradient. What recomputation repeats
/// is part of the input gradient. A schedule that takes an activation limit gets the limit with the shortest step that
/// fits.
///
/// # Errors
/// Returns [`Error::Argument`] if the schedule can't have this number of ranks and micro-batches.
pub(super) fn run_under(
    family: &Family,
    costs: &[StageCost],
    rank_of_stage: &[u32],
    micro_batches: u32,
) -> Result<(Schedule, Run)> {
    let ranks = rank_of_stage.iter().max().map_or(0, |last| last + 1);
    let request = Request {
        virtual_stages_per_rank: Some(costs.len() as u32 / ranks.max(1)),
        durations: family.options.contains(&"durations").then(|| durations(costs, rank_of_stage)),
        ..Request::new(ranks, micro_batches)
    };
    let mut runner = Runner { family, costs, request, built: FxHashMap::default(), sweep: Sweep::default() };
    let takes_a_limit = family.options.contains(&"activation_limit") && costs.len() == ranks as usize;
    if !takes_a_limit {
        return runner.run(None);
    }
    // ZB-H1 works with the p activations of 1F1B, and ZB-H2 removes the bubble with about 2 p. Smaller limits only save
    // memory, so they are tried below.
    let min = (ranks / 2).max(1);
    let mut best = runner.run(Some(min))?;
    let min_s = any_order(family).min_step_s(costs, micro_batches);
    for limit in [ranks, ranks + ranks / 2, 2 * ranks] {
        // No order is shorter, so larger limits would only take more memory.
        if best.1.fits() && best.1.step_s <= min_s {
            break;
        }
        let found = runner.run(Some(limit))?;
        if found.1.is_better_than(&best.1) {
            best = found;
        }
    }
    // If none of these limits fits, halve the smallest until one does.
    let mut limit = min;
    while limit > 1 && !best.1.fits() {
        limit /= 2;
        best = runner.run(Some(limit))?;
    }
    Ok(best)
}

/// Runs equal stages under several activation limits.
struct Runner<'a> {
    family: &'a Family,
    costs: &'a [StageCost],
    request: Request,
    /// Schedules that were built, by limit.
    built: FxHashMap<Option<u32>, Schedule>,
    sweep: Sweep,
}

impl Runner<'_> {
    /// Runs the stages with at most `limit` activations on each device.
    ///
    /// The limit is first lowered to the peak that the order reaches. So the peak number of micro-batches in flight,
    /// used as a limit, gives the same order again.
    fn run(&mut self, mut limit: Option<u32>) -> Result<(Schedule, Run)> {
        loop {
            if !self.built.contains_key(&limit) {
                let request = Request { activation_limit: limit, ..self.request.clone() };
                self.built.insert(limit, self.family.build(&request)?);
            }
            // A lower limit may give another order with a lower peak, so repeat until both agree.
            let peak = self.built[&limit].peak_in_flight().into_iter().max();
            match limit {
                Some(max) if peak.is_some_and(|peak| peak < max) => limit = peak,
                _ => break,
            }
        }
        let schedule = self.built[&limit].clone();
        let run = run(&schedule, &Peaks::of(&schedule), self.costs.to_vec(), &mut self.sweep)?;
        Ok((schedule, run))
    }
}

/// Returns the fastest allowed micro-batch size for one stage between every two neighboring cuts of `model`, on these
/// devices, under the schedule `name`. Sizes that fit memory come first.
///
/// Sizes with more actions than are simulated are left out, except the largest size.
///
/// # Errors
/// Returns [`Error::Argument`] if a device is unknown or used twice, if the schedule runs other stages on other ranks,
/// or if no micro-batch size can be shared.
pub fn fastest(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    devices: &[Vec<u32>],
    name: &str,
) -> Result<(u32, Schedule, Run)> {
    settings.check()?;
    cluster.check()?;
    let family = family(name)?;
    let mut groups: Vec<&Vec<u32>> = Vec::new();
    for named in devices {
        if !groups.contains(&named) {
            groups.push(named);
        }
    }
    let (stages, ranks) = (devices.len() as u32, groups.len() as u32);
    if !stages.is_multiple_of(ranks.max(1)) {
        return Err(Error::argument(
            format!(
                "{stages} stages are on {ranks} groups of devices, but `{name}` runs an equal number of stages on each"
            ),
            "name the same devices for an equal number of stages",
        ));
    }
    let micro_batches = |size: u32| settings.global_batch / size;
    let is_small = |size: u32| 3 * u64::from(stages) * u64::from(micro_batches(size)) <= effort::MAX_ACTIONS;
    let largest = settings.pipeline_micro_batch_sizes.iter().copied().max();
    let sizes =
        settings.pipeline_micro_batch_sizes.iter().copied().filter(|&size| is_small(size) || Some(size) == largest);
    let mut best: Option<(u32, Schedule, Run)> = None;
    let mut refused = None;
    for size in sizes {
        for recompute in settings.uniform_recompute() {
            // This order only decides which rank runs which stage. The run below fits it to the costs.
            let request =
                Request { virtual_stages_per_rank: Some(stages / ranks), ..Request::new(ranks, micro_batches(size)) };
            let found = family.build(&request).and_then(|schedule| {
                let footprints = footprints(cluster, devices, &schedule)?;
                let ranks = &schedule.rank_of_stage;
                let recompute = vec![recompute; devices.len()];
                let mut cost_cache = CostCache::new((model, cluster, settings), size, recompute, ranks, footprints);
                let cuts: Vec<usize> = (0..=devices.len()).collect();
                run_under(family, &cost_cache.of(&cuts)?, ranks, micro_batches(size))
            });
            match found {
                Ok((schedule, run)) => {
                    if best.as_ref().is_none_or(|(.., best)| run.is_better_than(best)) {
                        best = Some((size, schedule, run));
                    }
                }
                // A size that is refused is no error if another one works.
                Err(error) => refused = Some(error),
            }
        }
    }
    best.ok_or_else(|| {
        refused.unwrap_or_else(|| {
            Error::argument("there is no micro-batch size to choose from", "allow at least one micro-batch size")
        })
    })
}
