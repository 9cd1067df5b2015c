//! Conditions that every plan meets whose stages fit the devices' memory.
//!
//! Where one of them fails no plan fits, and no search is needed to say so. They leave out what a plan may avoid (links,
//! speeds, the devices' machines), so that a plan that meets all of them may still not exist. docs/proofs.md, *Memory*,
//! proves them.

use rayon::prelude::*;

use super::settings::Settings;
use super::task::Task;
use crate::control::Control;
use crate::cost::network::Cluster;
use crate::cost::{self, Model};
use crate::error::Result;

/// Which plans a condition is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedules {
    /// Whether the warm-up is that of the settings. Otherwise a stage may hold a single micro-batch.
    pub warms_up: bool,
    /// Whether each device has one stage.
    pub one_stage_a_device: bool,
}

impl Schedules {
    /// The schedule of the settings.
    pub const OF_SETTINGS: Self = Self { warms_up: true, one_stage_a_device: true };
}

/// How many stages from the end [`Conditions::fit_stages`] distinguishes by the micro-batches that they hold. Stages further
/// in front hold at least as many, so a lower number weakens the condition. Not tuned.
const MAX_LEVELS: usize = 16;
/// Stages whose memory is computed for all micro-batch sizes together: about 20 ns each. Where there are more, fewer levels
/// are distinguished, or only the conditions on layers are checked. Not tuned.
const MAX_STAGES_PRICED: usize = 5_000_000;
/// Share of the whole model's memory that sums in another order may differ by.
const ROUNDING: f64 = 1e-9;

/// Returns whether it is certain that no plan fits the devices' memory. `false` means that nothing is known.
///
/// # Errors
/// [`crate::Error::Argument`] or [`crate::Error::Cluster`] for input that makes no sense.
pub fn nothing_fits(
    model: &Model,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    control: &Control,
) -> Result<bool> {
    settings.check()?;
    cluster.check()?;
    let tasks = Task::all(model, cluster, settings);
    let conditions: Vec<Conditions> = tasks.iter().map(|task| Conditions::new(task, schedules)).collect();
    // The conditions on stages take longest, so those on layers come first for all sizes.
    let open: Vec<&Conditions> = conditions.iter().filter(|each| each.fit_layers()).collect();
    let most_priced = MAX_STAGES_PRICED / open.len().max(1);
    Ok(!open.par_iter().any(|each| each.fit_stages(most_priced, control)))
}

/// Returns whether [`nothing_fits`] is certain of it by the conditions on layers alone, which need no cuts.
///
/// # Errors
/// As [`nothing_fits`].
pub fn no_layers_fit(model: &Model, cluster: &Cluster, settings: &Settings) -> Result<bool> {
    settings.check()?;
    cluster.check()?;
    let tasks = Task::all(model, cluster, settings);
    Ok(!tasks.iter().any(|task| Conditions::new(task, Schedules::OF_SETTINGS).fit_layers()))
}

/// The conditions on plans of one micro-batch size.
struct Conditions<'a> {
    task: &'a Task<'a>,
    schedules: Schedules,
    /// For each amount of memory that some device has, ascending, how many devices have at least that much.
    capacities: Vec<(f64, u32)>,
    /// Memory of all devices.
    all_bytes: f64,
    /// For each share the fewest and the most replicas that get it, and the index of its totals.
    splits: Vec<(u32, u32, usize)>,
}

impl<'a> Conditions<'a> {
    fn new(task: &'a Task<'a>, schedules: Schedules) -> Self {
        let mut devices: Vec<(f64, u32)> =
            task.cluster.machines.iter().map(|machine| (machine.memory_bytes, machine.devices)).collect();
        devices.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut capacities: Vec<(f64, u32)> = Vec::new();
        let mut count = 0;
        for (memory_bytes, devices) in devices {
            count += devices;
            let capacity_bytes = memory_bytes - task.settings.memory.reserved_bytes;
            match capacities.last_mut() {
                Some((last, all)) if last.total_cmp(&capacity_bytes).is_eq() => *all = count,
                _ => capacities.push((capacity_bytes, count)),
            }
        }
        capacities.reverse();
        let all_bytes = (task.cluster.machines.iter())
            .map(|machine| f64::from(machine.devices) * (machine.memory_bytes - task.settings.memory.reserved_bytes))
            .map(|bytes| bytes.max(0.0))
            .sum();
        let mut splits: Vec<(u32, u32, usize)> = Vec::new();
        for (replicas, share) in (0_u32..).zip(&task.share) {
            let Some(share) = share.map(|share| share as usize) else { continue };
            match splits.last_mut() {
                Some((_, most, last)) if *last == share => *most = replicas,
                _ => splits.push((replicas, replicas, share)),
            }
        }
        Self { task, schedules, capacities, all_bytes, splits }
    }

    /// Returns the smallest capacity that `replicas` devices have which need so much each. `None` if there are too few of
    /// them.
    fn capacity_bytes(&self, needed_bytes: f64, replicas: u32) -> Option<f64> {
        let at = self.capacities.partition_point(|&(capacity_bytes, _)| capacity_bytes < needed_bytes);
        self.capacities.get(at).filter(|&&(_, devices)| replicas <= devices).map(|&(capacity_bytes, _)| capacity_bytes)
    }

    /// Micro-batches that a stage holds at least, if so many stages, itself included, are behind its begin.
    fn in_flight(&self, from_end: u32) -> u32 {
        if self.schedules.warms_up { self.task.settings.windows(from_end, self.task.micro_batches).0 } else { 1 }
    }

    /// Returns whether each layer fits some devices, and all layers together fit all devices.
    fn fit_layers(&self) -> bool {
        let Task { model, settings, recompute, .. } = *self.task;
        let memory = &settings.memory;
        let in_flight = if recompute { 1.0 } else { f64::from(self.in_flight(1)) };
        // What one replica of a layer holds, without what is received and sent: weights, and activations.
        let held_bytes = |layer: usize, (_, most, share): (u32, u32, usize)| {
            let sharing = if memory.shard_optimizer { f64::from(most) } else { 1.0 };
            let of_weight = 1.0 + memory.gradients_per_weight + memory.optimizer_per_weight / sharing;
            let saved_bytes = self.task.totals[share].layer_saved_bytes[layer];
            (model.layer_parameter_bytes[layer] * of_weight, in_flight * saved_bytes)
        };
        let layers = model.layer_parameter_bytes.len();
        let mut whole_bytes = 0.0;
        let mut does_each_fit = true;
        for layer in 0..layers {
            let (mut least_bytes, mut fits) = (f64::INFINITY, false);
            for &split in &self.splits {
                let (weights_bytes, saved_bytes) = held_bytes(layer, split);
                let counted_bytes = if self.schedules.one_stage_a_device { saved_bytes } else { 0.0 };
                least_bytes = least_bytes.min(f64::from(split.0) * (weights_bytes + counted_bytes));
                fits |= self.capacity_bytes((weights_bytes + saved_bytes) * (1.0 - ROUNDING), split.0).is_some();
            }
            whole_bytes += least_bytes;
            does_each_fit &= fits;
        }
        does_each_fit && whole_bytes * (1.0 - ROUNDING) <= self.all_bytes
    }

    /// Returns whether stages between cuts can follow one another, each on devices that have the memory for it, until there
    /// are no more devices, or no more memory. Devices may be any, whatever other stages take.
    fn fit_stages(&self, most_priced: usize, control: &Control) -> bool {
        let Task { model, settings, .. } = *self.task;
        let last = model.cuts() - 1;
        let most_stages = (settings.most_stages as usize).min(last).min(self.task.cluster.devices() as usize);
        let has_levels = self.in_flight(2) > self.in_flight(1);
        let levels = if has_levels { MAX_LEVELS.min(self.task.micro_batches as usize).min(most_stages) } else { 1 };
        let levels = levels.min(most_priced / (model.pairs() * self.splits.len()).max(1));
        if !(model.has_all_cuts && self.schedules.one_stage_a_device) || levels == 0 {
            return true;
        }
        let all_devices = f64::from(self.capacities[0].1);
        let all_bytes = self.all_bytes * (1.0 + ROUNDING);
        // For each cut the least that the stages behind it take, of devices and of memory of devices, each by itself.
        let nothing = (f64::INFINITY, f64::INFINITY);
        let mut behind = vec![nothing; last + 1];
        behind[last] = (0.0, 0.0);
        for level in 1..=levels {
            let is_last = level == levels;
            let in_flight = self.in_flight(level as u32);
            let mut taken = vec![nothing; last + 1];
            for end in (1..=last).rev() {
                // The last level stands for all numbers of stages from there on.
                let (mut devices, mut bytes) = behind[end];
                if is_last {
                    devices = devices.min(taken[end].0);
                    bytes = bytes.min(taken[end].1);
                }
                if devices >= all_devices || bytes > all_bytes || control.should_stop() {
                    continue;
                }
                for begin in model.begins(end) {
                    let begin = begin as usize;
                    let mut is_too_large = true;
                    for &(fewest, most, share) in &self.splits {
                        let totals = &self.task.totals[share];
                        let held = cost::memory(
                            model,
                            totals,
                            &settings.memory,
                            (begin, end),
                            most,
                            in_flight,
                            self.task.recompute,
                        );
                        let weights_bytes = held.weights_bytes + held.gradients_bytes + held.optimizer_bytes;
                        is_too_large &= self.capacity_bytes(weights_bytes, fewest).is_none();
                        let Some(capacity_bytes) = self.capacity_bytes(held.total_bytes(), fewest) else { continue };
                        let entry = &mut taken[begin];
                        entry.0 = entry.0.min(devices + f64::from(fewest));
                        entry.1 = entry.1.min(bytes + f64::from(fewest) * capacity_bytes);
                    }
                    // Weights grow with the layers, and so does each stage that begins earlier in a chain.
                    if is_too_large && model.is_chain && model.ties.is_empty() {
                        break;
                    }
                }
            }
            let (devices, bytes) = taken[0];
            if devices <= all_devices && bytes <= all_bytes {
                return true;
            }
            behind = taken;
        }
        control.should_stop()
    }
}
