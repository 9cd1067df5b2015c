//! Fits a schedule to stages whose costs are known: its activation limit, and its order where that looks at times.

use crate::planner::effort::orders as effort;
use crate::planner::hybrid::{Settings, StageCost};
use rustc_hash::FxHashMap;

use super::run::{Peaks, Prices, Run, durations, footprints, run};
use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::schedule::{Family, Request, Schedule, family};
use crate::simulate::Sweep;

/// Runs stages under a schedule: activations are held until the weight-gradient pass where the schedule splits the
/// backward pass, and what recomputation repeats is part of the input-gradient pass. A schedule that takes an
/// activation limit gets the one that gives the shortest step within memory.
///
/// # Errors
/// [`Error::Argument`] if the schedule can't have so many ranks and micro-batches.
pub(super) fn run_under(
    family: &Family,
    costs: &[StageCost],
    rank_of_stage: &[u32],
    micro_batches: u32,
    recompute: bool,
) -> Result<(Schedule, Run)> {
    let ranks = rank_of_stage.iter().max().map_or(0, |last| last + 1);
    let request = Request {
        chunks: Some(costs.len() as u32 / ranks.max(1)),
        durations: family.options.contains(&"durations").then(|| durations(costs, rank_of_stage, recompute)),
        ..Request::new(ranks, micro_batches)
    };
    let mut runner = Runner { family, costs, request, recompute, built: FxHashMap::default(), sweep: Sweep::default() };
    let takes_a_limit = family.options.contains(&"cap") && costs.len() == ranks as usize;
    if !takes_a_limit {
        return runner.run(None);
    }
    let least = (ranks / 2).max(1);
    let mut best = runner.run(Some(least))?;
    for limit in [ranks, ranks + ranks / 2, 2 * ranks] {
        let found = runner.run(Some(limit))?;
        if found.1.is_better_than(&best.1) {
            best = found;
        }
    }
    let mut limit = least;
    while limit > 1 && !best.1.fits() {
        limit /= 2;
        best = runner.run(Some(limit))?;
    }
    Ok(best)
}

/// Runs the same stages under several activation limits.
struct Runner<'a> {
    family: &'a Family,
    costs: &'a [StageCost],
    request: Request,
    recompute: bool,
    /// By the limit.
    built: FxHashMap<Option<u32>, Schedule>,
    sweep: Sweep,
}

impl Runner<'_> {
    /// At most `limit` activations on each device. The limit is lowered to what the order reaches, so that the most
    /// micro-batches in flight are a limit that gives the same order.
    fn run(&mut self, mut limit: Option<u32>) -> Result<(Schedule, Run)> {
        loop {
            if !self.built.contains_key(&limit) {
                let request = Request { cap: limit, ..self.request.clone() };
                self.built.insert(limit, self.family.build(&request)?);
            }
            let peak = self.built[&limit].peak_in_flight().into_iter().max();
            match limit {
                Some(most) if peak.is_some_and(|peak| peak < most) => limit = peak,
                _ => break,
            }
        }
        let orders = self.built[&limit].clone();
        let run = run(&orders, &Peaks::of(&orders), self.costs.to_vec(), self.recompute, &mut self.sweep)?;
        Ok((orders, run))
    }
}

/// The fastest of the allowed micro-batch sizes for one stage between every two neighbouring cuts of `model`, on these
/// devices, under the schedule `name`; of those that fit memory, if any does. Sizes with too many micro-batches to be
/// simulated quickly are left out, if not all have.
///
/// # Errors
/// [`Error::Argument`] if a device is unknown or used twice, the schedule runs other stages on other ranks, or no
/// micro-batch size can be shared.
pub fn fastest(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    devices: &[Vec<u32>],
    name: &str,
) -> Result<(u32, bool, Schedule, Run)> {
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
            format!("{stages} stages on {ranks} groups of devices are not as many on each"),
            format!("`{name}` runs as many stages on each device: name the same devices for each of them"),
        ));
    }
    let micro_batches = |size: u32| settings.global_batch / size;
    let is_small = |size: u32| 3 * u64::from(stages) * u64::from(micro_batches(size)) <= effort::MAX_ACTIONS;
    let largest = settings.micro_batch_sizes.iter().copied().max();
    let sizes = settings.micro_batch_sizes.iter().copied().filter(|&size| is_small(size) || Some(size) == largest);
    let mut best: Option<(u32, bool, Schedule, Run)> = None;
    let mut refused = None;
    for size in sizes {
        for &recompute in &settings.recompute {
            // This is only about who runs which stage, and a few micro-batches tell.
            let request = Request { chunks: Some(stages / ranks), ..Request::new(ranks, micro_batches(size)) };
            let found = family.build(&request).and_then(|orders| {
                let footprints = footprints(cluster, devices, &orders)?;
                let ranks = &orders.rank_of_stage;
                let mut prices = Prices::new((model, cluster, settings), size, recompute, ranks, footprints);
                let cuts: Vec<usize> = (0..=devices.len()).collect();
                run_under(family, &prices.of(&cuts)?, ranks, micro_batches(size), recompute)
            });
            match found {
                Ok((orders, run)) => {
                    if best.as_ref().is_none_or(|(.., best)| run.is_better_than(best)) {
                        best = Some((size, recompute, orders, run));
                    }
                }
                Err(error) => refused = Some(error),
            }
        }
    }
    best.ok_or_else(|| {
        refused.unwrap_or_else(|| Error::argument("there is no micro-batch size to choose from", "give one"))
    })
}
