//! The least that any stages in front of a cut add to the paths of a suffix, were every stage placed at its best.
//!
//! One relaxed pass over cuts and numbers of devices, from the first cut to the last. Machines don't matter in it: each
//! stage gets the best links and the fastest, largest devices of the cluster. Each table below is the least of its own,
//! so together they never exceed what a real plan adds.

use super::paths::Paths;
use super::task::Task;
use crate::cluster::{Cluster, Rate};
use crate::cost::{self, Totals};

/// More devices than this are rounded up to one of as many levels.
const LEVELS: u32 = 192;

/// What the stages in front of a cut add, in seconds.
#[derive(Debug, Clone, Copy)]
struct Least {
    /// To `drained`: forwards, backwards and transfers both ways of one micro-batch.
    trip_s: f64,
    /// To `synced`: forwards and transfers of one micro-batch.
    fill_s: f64,
    /// To `first_back`: one of the stages still has all backwards before it.
    backwards_s: f64,
    /// To `last_back`: one of the stages had all forwards behind it.
    forwards_s: f64,
    /// To `last_synced`: likewise.
    starts_s: f64,
    /// To `drained`: the way up to one of the stages, and its gradient synchronisation.
    syncs_s: f64,
}

/// The tables.
pub(super) struct Prefixes {
    /// Numbers of devices that the tables are made for, ascending.
    levels: Vec<u32>,
    /// `[cut * levels + level]`.
    least: Vec<Least>,
}

impl Prefixes {
    /// Leaves out stages that alone reach the threshold.
    #[expect(clippy::too_many_lines, reason = "one loop nest; its parts share every name")]
    pub(super) fn new(task: &Task<'_>, threshold_s: f64) -> Self {
        let (model, cluster) = (task.model, task.cluster);
        let devices = cluster.devices();
        let every = devices <= LEVELS;
        let levels: Vec<u32> = if every {
            (0..=devices).collect()
        } else {
            let part = |level| (u64::from(devices) * u64::from(level)).div_ceil(u64::from(LEVELS)) as u32;
            (0..=LEVELS).map(part).collect()
        };
        let level_of = |devices: u32| {
            if every { devices as usize } else { levels.partition_point(|&level| level < devices) }
        };
        let speed = cluster.machines.iter().map(|machine| machine.speed).fold(0.0, f64::max);
        // The slowest devices hide most of their gradient synchronisation.
        let slowest = cluster.machines.iter().map(|machine| machine.speed).fold(f64::INFINITY, f64::min);
        let memory_bytes = cluster.machines.iter().map(|machine| machine.memory_bytes).fold(0.0, f64::max)
            - task.settings.memory.reserved_bytes;
        let widest = cluster.machines.iter().map(|machine| machine.devices).max().unwrap_or(1);
        let port = cluster.inter.bytes_per_s + if widest > 1 { cluster.intra.bytes_per_s } else { 0.0 };
        let latency_s =
            if widest > 1 { cluster.inter.latency_s.min(cluster.intra.latency_s) } else { cluster.inter.latency_s };
        // The fewest and the most replicas for each share: the fewest leave most devices to other stages and have the
        // least to synchronise, the most have the smallest transfers and parts of a sharded optimizer.
        let mut splits: Vec<(u32, u32, u32)> = Vec::new();
        for (count, share) in (0_u32..).zip(&task.share) {
            match (*share, splits.last_mut()) {
                (Some(share), Some((_, most, last))) if *last == share => *most = count,
                (Some(share), _) => splits.push((count, count, share)),
                (None, _) => {}
            }
        }
        let micro_batches = f64::from(task.micro_batches);
        let cuts = model.cuts();
        let none = f64::INFINITY;
        let nothing =
            Least { trip_s: none, fill_s: none, backwards_s: none, forwards_s: none, starts_s: none, syncs_s: none };
        let start = Least { trip_s: 0.0, fill_s: 0.0, backwards_s: 0.0, forwards_s: 0.0, starts_s: 0.0, syncs_s: 0.0 };
        let mut least = vec![nothing; cuts * levels.len()];
        least[..levels.len()].fill(start);
        for end in 1..cuts {
            let is_last = end + 1 == cuts;
            let window = task.settings.windows(if is_last { 1 } else { 2 }, task.micro_batches).0;
            for &(replicas, most_replicas, share) in &splits {
                let totals = &task.totals[share as usize];
                let transfer_s =
                    if is_last { 0.0 } else { task.cut_bytes[end] / (f64::from(most_replicas) * port) + latency_s };
                let s_per_byte = least_sync_s_per_byte(cluster, widest, replicas);
                let rate = Rate { s_per_byte, latency_s: 0.0 };
                let (mut sync_s, mut begun) = (0.0, end);
                for &begin in &model.begins[end] {
                    let begin = begin as usize;
                    let forward_s = (totals.forward_s[end] - totals.forward_s[begin]) / speed;
                    let mut backward_s = (totals.backward_s[end] - totals.backward_s[begin]) / speed;
                    if task.recompute {
                        backward_s += forward_s;
                    }
                    let work_s = forward_s + backward_s;
                    if micro_batches * work_s >= threshold_s {
                        if model.is_chain {
                            break;
                        }
                        continue;
                    }
                    if model.is_chain {
                        let layers = model.layers_between(begin, begun);
                        sync_s =
                            cost::extend_sync(model, totals, slowest, layers, rate, task.settings.overlap_sync, sync_s);
                        begun = begin;
                    } else {
                        sync_s = cost::sync_s(model, totals, slowest, (begin, end), rate, task.settings.overlap_sync);
                    }
                    let memory = cost::memory(
                        model,
                        totals,
                        &task.settings.memory,
                        (begin, end),
                        most_replicas,
                        window,
                        task.recompute,
                    );
                    if memory.total_bytes() > memory_bytes {
                        continue;
                    }
                    let trip_s = work_s + 2.0 * transfer_s;
                    let fill_s = forward_s + transfer_s;
                    let (others, all_s) = (micro_batches - 1.0, micro_batches * work_s);
                    for level in level_of(replicas)..levels.len() {
                        let rest = level_of(levels[level] - replicas);
                        let before = least[begin * levels.len() + rest];
                        // The stage's gradients are summed while earlier stages drain.
                        if all_s + before.trip_s.max(before.fill_s + sync_s) >= threshold_s {
                            continue;
                        }
                        let here = &mut least[end * levels.len() + level];
                        let lower = |value: &mut f64, other: f64| *value = value.min(other);
                        lower(&mut here.trip_s, before.trip_s + trip_s);
                        lower(&mut here.fill_s, before.fill_s + fill_s);
                        let from_here = before.trip_s + trip_s;
                        let above = |path_s: f64| path_s + trip_s;
                        lower(&mut here.backwards_s, above(before.backwards_s).max(from_here + others * backward_s));
                        lower(&mut here.forwards_s, above(before.forwards_s).max(from_here + others * forward_s));
                        lower(&mut here.syncs_s, above(before.syncs_s).max(before.fill_s + trip_s + sync_s));
                        let started_s = before.fill_s + fill_s + others * forward_s;
                        lower(&mut here.starts_s, (before.starts_s + fill_s).max(started_s));
                    }
                }
            }
        }
        Self { levels, least }
    }

    fn at(&self, cut: usize, free: u32) -> &Least {
        let level = if self.levels.len() > free as usize && self.levels[free as usize] == free {
            free as usize
        } else {
            self.levels.partition_point(|&level| level < free)
        };
        &self.least[cut * self.levels.len() + level]
    }

    /// The least that any plan takes from its first forward to its last backward.
    pub(super) fn least_s(&self) -> f64 {
        let last = self.least.last().expect("there is a level for all devices");
        last.trip_s.max(last.backwards_s).max(last.forwards_s)
    }

    /// The least that stages in front of a cut add to one micro-batch on its way through; infinite if none fit there.
    pub(super) fn trip_s(&self, cut: usize, free: u32) -> f64 {
        self.at(cut, free).trip_s
    }

    /// No plan that ends in a suffix with these paths is shorter.
    pub(super) fn bound_s(&self, paths: &Paths, cut: usize, free: u32) -> f64 {
        let least = self.at(cut, free);
        (paths.drained_s + least.trip_s.max(least.syncs_s))
            .max(paths.synced_s + least.fill_s)
            .max(paths.first_back_s + least.backwards_s)
            .max(paths.last_back_s + least.forwards_s)
            .max(paths.last_synced_s + least.starts_s)
    }
}

/// No plan has a shorter step: all devices at work all the time, or one micro-batch on its way through.
pub(super) fn least_step_s(task: &Task<'_>) -> f64 {
    let last = task.model.cuts() - 1;
    let prefixes = Prefixes::new(task, f64::INFINITY);
    let alone_s = prefixes.bound_s(&Paths::default(), last, task.cluster.devices());
    let speed: f64 = task.cluster.machines.iter().map(|m| f64::from(m.devices) * m.speed).sum();
    // For each layer the split that costs all its replicas together the least.
    let forwards = if task.recompute { 2.0 } else { 1.0 };
    let splits: Vec<(f64, &Totals)> = (task.share.iter().zip(0_u32..))
        .filter_map(|(share, replicas)| share.map(|share| (f64::from(replicas), &task.totals[share as usize])))
        .collect();
    let work_s: f64 = (0..task.model.layer_parameter_bytes.len())
        .map(|layer| {
            (splits.iter())
                .map(|(replicas, t)| replicas * (forwards * t.layer_forward_s[layer] + t.layer_backward_s[layer]))
                .fold(f64::INFINITY, f64::min)
        })
        .sum();
    alone_s.max(f64::from(task.micro_batches) * work_s / speed)
}

/// The least that summing a byte over so many replicas takes, however they are placed.
fn least_sync_s_per_byte(cluster: &Cluster, widest: u32, replicas: u32) -> f64 {
    let ring = |members: u32| 2.0 * f64::from(members - 1) / f64::from(members);
    let machines = replicas.div_ceil(widest);
    if machines > 1 {
        return ring(machines) / cluster.inter.collective_bytes_per_s;
    }
    let inside = ring(replicas) / cluster.intra.collective_bytes_per_s;
    if replicas > 1 { inside.min(ring(2) / cluster.inter.collective_bytes_per_s) } else { 0.0 }
}
