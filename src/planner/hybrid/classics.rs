//! The plans that people try first: pure data parallelism, and a straight pipeline of single devices.
//!
//! They are points of the search space; a report says by how much they are slower, or what memory they lack.

use super::price::{Candidate, Priced, Pricer, StageChoice};
use super::settings::Settings;
use super::{Answer, Search};
use crate::cluster::Cluster;
use crate::control::Control;
use crate::cost::Model;
use crate::error::{Error, Result};

/// One stage on as many devices as may share a micro-batch: the fastest that fits, else the one that lacks least.
///
/// `None` if no number of devices may share any of the micro-batch sizes.
#[must_use]
pub fn data_parallel(model: &Model, cluster: &Cluster, settings: &Settings) -> Option<(Candidate, Priced)> {
    let mut pricer = Pricer::new(model, cluster, settings);
    let mut best: Option<(f64, Candidate, Priced)> = None;
    for &micro_batch in &settings.micro_batches {
        let Some(replicas) = (1..=cluster.devices()).rev().find(|&r| settings.share(micro_batch, r).is_some()) else {
            continue;
        };
        for &recompute in &settings.recompute {
            let end = model.cuts() - 1;
            let window = settings.windows(1, settings.global_batch / micro_batch).0;
            let stage = StageChoice { begin: 0, end, footprint: first_devices(cluster, replicas), window };
            let plan = Candidate { micro_batch, recompute, stages: vec![stage] };
            let Ok(priced) = pricer.price(&plan) else { continue };
            let lacking_bytes = priced.stages[0].memory.total_bytes() - priced.stages[0].capacity_bytes;
            // Whatever fits is better than whatever doesn't; then the faster, then the one that lacks less.
            let better = best.as_ref().is_none_or(|(best_lacking_bytes, _, best)| {
                match (lacking_bytes > 0.0, *best_lacking_bytes > 0.0) {
                    (false, true) => true,
                    (true, false) => false,
                    (false, false) => priced.step_s < best.step_s,
                    (true, true) => lacking_bytes < *best_lacking_bytes,
                }
            });
            if better {
                best = Some((lacking_bytes, plan, priced));
            }
        }
    }
    best.map(|(_, plan, priced)| (plan, priced))
}

/// The best straight pipeline that a quick search finds: one device a stage.
///
/// # Errors
/// As [`super::plan`].
pub fn straight(model: &Model, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<Answer> {
    let settings = Settings { most_replicas: 1, ..settings.clone() };
    let mut search = Search::new(model, cluster, &settings, control);
    search.reach()?;
    search.answer()
}

/// Some plan that fits, found without a proof: whether there is one.
///
/// # Errors
/// [`Error::Infeasible`] if none fits, [`Error::Cancelled`] if it was stopped before it knew.
pub fn fitting(model: &Model, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<Answer> {
    let mut search = Search::new(model, cluster, settings, control);
    search.reach()?;
    search.answer()
}

/// The plan that comes closest to fitting, and the memory it would need: found by growing every device until one fits.
/// Stopped early, it is the closest so far.
///
/// # Errors
/// [`Error::Infeasible`] if no plan would fit any memory: no micro-batch can be shared. [`Error::Cancelled`] if it was
/// stopped before there was any plan.
pub fn closest(model: &Model, cluster: &Cluster, settings: &Settings, control: &Control) -> Result<Answer> {
    let try_memory = |factor: f64| {
        let mut cluster = cluster.clone();
        cluster.machines.iter_mut().for_each(|machine| machine.memory_bytes *= factor);
        fitting(model, &cluster, settings, control)
    };
    let (mut low, mut high) = (0_i32, 1_i32);
    // Powers of 2^(1/16), so that the answer is within 5 % of the least memory.
    let factor = |exponent: i32| 2.0_f64.powf(f64::from(exponent) / 16.0);
    let mut answer = loop {
        match try_memory(factor(high)) {
            Err(Error::Infeasible { .. }) if high < 16 * 40 => (low, high) = (high, high * 2),
            other => break other?,
        }
    };
    while high - low > 1 {
        let middle = i32::midpoint(low, high);
        match try_memory(factor(middle)) {
            Ok(found) => (high, answer) = (middle, found),
            Err(Error::Infeasible { .. }) => low = middle,
            Err(Error::Cancelled) => break,
            Err(other) => return Err(other),
        }
    }
    Ok(answer)
}

/// The first so many devices, machine by machine.
fn first_devices(cluster: &Cluster, mut count: u32) -> Vec<(u32, u32)> {
    let mut footprint = Vec::new();
    for (machine, devices) in (0_u32..).zip(cluster.machines.iter().map(|machine| machine.devices)) {
        let taken = devices.min(count);
        if taken > 0 {
            footprint.push((machine, taken));
        }
        count -= taken;
    }
    footprint
}
