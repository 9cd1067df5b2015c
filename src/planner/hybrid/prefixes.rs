//! The least that any stages in front of a cut add to the paths of a suffix, were every stage placed at its best.
//!
//! One relaxed pass over cuts and numbers of devices, from the first cut to the last. Machines don't matter in it: each
//! stage gets the best links and the fastest, largest devices of the cluster. Each table below is the least of its own,
//! so together they never exceed what a real plan adds.

use super::paths::Paths;
use super::settings::largest_window;
use super::task::Task;
use crate::control::Control;
use crate::cost::network::{Cluster, Machine, Rate};
use crate::cost::{self, Totals};

/// More devices than this are rounded up to one of as many levels, ...
const MOST_LEVELS: usize = 192;
/// ... or fewer, but not than these.
const FEWEST_LEVELS: usize = 32;
/// Stages, with numbers of devices in front of them, that all tables together look at, where that is possible.
const MOST_WORK: usize = 40_000_000;
/// Numbers of stages behind a cut that matter more than the room on a machine.
const DEEP: usize = 4;
/// Cuts and splits of a branching model up to which the tables know gradient synchronisation.
const MOST_SYNCED: usize = 20_000;

/// What the stages in front of a cut add, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Least {
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
    /// To `first_back`: one of the stages waits for its first round trip, less the forwards that take place meanwhile.
    waits_s: f64,
    /// To `first_back` and `last_back` together: likewise, for its last round trip, too.
    both_s: f64,
}

impl Least {
    /// No stages fit there.
    const NONE: Self = Self::all(f64::INFINITY, f64::INFINITY);

    /// Nothing is in front, so nobody waits.
    pub(super) const EMPTY: Self = Self::all(0.0, f64::NEG_INFINITY);

    const fn all(each_s: f64, both_s: f64) -> Self {
        Self {
            trip_s: each_s,
            fill_s: each_s,
            backwards_s: each_s,
            forwards_s: each_s,
            starts_s: each_s,
            syncs_s: each_s,
            waits_s: each_s,
            both_s,
        }
    }
}

/// Names of [`Least::sums_s`].
#[cfg(test)]
pub(super) const SUMS: [&str; 8] = ["trip", "syncs", "fill", "backwards", "forwards", "starts", "waits", "both"];

/// What a stage in front of a cut, and its transfer to the stage behind it, do to each of them.
struct FrontStage {
    trip_s: f64,
    fill_s: f64,
    others_forward_s: f64,
    others_backward_s: f64,
    sync_s: f64,
    wait_s: f64,
    both_s: f64,
}

impl FrontStage {
    fn new(forward_s: f64, backward_s: f64, sync_s: f64, transfer_s: f64, window: u32, micro_batches: u32) -> Self {
        let count = f64::from(micro_batches);
        let skipped = f64::from(window - 1);
        let work_s = forward_s + backward_s;
        Self {
            trip_s: work_s + 2.0 * transfer_s,
            fill_s: forward_s + transfer_s,
            others_forward_s: (count - 1.0) * forward_s,
            others_backward_s: (count - 1.0) * backward_s,
            sync_s,
            wait_s: 2.0 * transfer_s + count * work_s - skipped * forward_s,
            both_s: if window < micro_batches {
                4.0 * transfer_s + (count - skipped) * work_s
            } else {
                f64::NEG_INFINITY
            },
        }
    }
}

impl Least {
    /// What these stages and one more behind them add.
    #[cfg(test)]
    pub(super) fn behind(&self, stage: &super::paths::PathStage, micro_batches: u32) -> Self {
        let transfer_s = stage.busy_s + stage.latency_s;
        let (forward_s, backward_s, sync_s) = (stage.forward_s, stage.backward_s, stage.sync_s);
        let stage = FrontStage::new(forward_s, backward_s, sync_s, transfer_s, stage.window, micro_batches);
        let mut least = Self::NONE;
        least.lower(&stage, self);
        least
    }

    /// Takes a stage into account that has `before` in front of it.
    #[inline]
    fn lower(&mut self, stage: &FrontStage, before: &Self) {
        let above = |path_s: f64| path_s + stage.trip_s;
        let from_here = above(before.trip_s);
        let started_s = before.fill_s + stage.fill_s + stage.others_forward_s;
        let lower = |value: &mut f64, other: f64| *value = value.min(other);
        lower(&mut self.trip_s, from_here);
        lower(&mut self.fill_s, before.fill_s + stage.fill_s);
        lower(&mut self.backwards_s, above(before.backwards_s).max(from_here + stage.others_backward_s));
        lower(&mut self.forwards_s, above(before.forwards_s).max(from_here + stage.others_forward_s));
        lower(&mut self.starts_s, (before.starts_s + stage.fill_s).max(started_s));
        lower(&mut self.syncs_s, above(before.syncs_s).max(above(before.fill_s) + stage.sync_s));
        lower(&mut self.waits_s, above(before.waits_s).max(before.trip_s + stage.wait_s));
        lower(&mut self.both_s, (before.both_s + 2.0 * stage.trip_s).max(before.trip_s + stage.both_s));
    }

    /// With the paths of a suffix: a step is none of these shorter. [`SUMS`] names them.
    #[inline]
    pub(super) fn sums_s(&self, paths: &Paths) -> [f64; 8] {
        [
            paths.drained_s + self.trip_s,
            paths.drained_s + self.syncs_s,
            paths.synced_s + self.fill_s,
            paths.first_back_s + self.backwards_s,
            paths.last_back_s + self.forwards_s,
            paths.last_synced_s + self.starts_s,
            paths.first_back_s + self.waits_s,
            paths.first_back_s + paths.last_back_s + self.both_s,
        ]
    }

    /// The lesser of each.
    fn or(&self, other: &Self) -> Self {
        Self {
            trip_s: self.trip_s.min(other.trip_s),
            fill_s: self.fill_s.min(other.fill_s),
            backwards_s: self.backwards_s.min(other.backwards_s),
            forwards_s: self.forwards_s.min(other.forwards_s),
            starts_s: self.starts_s.min(other.starts_s),
            syncs_s: self.syncs_s.min(other.syncs_s),
            waits_s: self.waits_s.min(other.waits_s),
            both_s: self.both_s.min(other.both_s),
        }
    }
}

/// The tables.
pub(super) struct Prefixes {
    /// Numbers of devices that the tables are made for, ascending.
    levels: Vec<u32>,
    /// Most devices that a machine has left for the stages in front of one that lies in it; 0 if any may be anywhere.
    most_room: usize,
    /// One table for each number of stages behind the cut, the last one for more; by cut, level and room.
    least: Vec<Vec<Least>>,
}

/// What all tables are made from.
struct Sources<'a> {
    task: &'a Task<'a>,
    threshold_s: f64,
    /// Of the fastest device.
    speed: f64,
    /// Of the slowest one: it hides most of its gradient synchronisation.
    slowest: f64,
    /// Of the largest device.
    memory_bytes: f64,
    /// Of the machine with most devices.
    widest: u32,
    /// Bytes per second that leave a device at most.
    port: f64,
    latency_s: f64,
    splits: Vec<Split>,
    levels: usize,
    most_room: usize,
}

/// Numbers of replicas that give their devices the same share.
struct Split {
    share: u32,
    /// The fewest leave most devices to other stages and have the least to synchronise.
    fewest: u32,
    /// The most have the smallest transfers and parts of a sharded optimizer.
    most: u32,
    /// For each level, from the first that has enough devices, the level of the devices that are left.
    rests: Vec<(usize, usize)>,
}

impl Prefixes {
    /// Leaves out stages that alone reach the threshold; tells at most so many numbers of stages behind a cut apart.
    /// `machine` is the size of all machines, if a stage of no more devices lies in one of them, and a larger one takes
    /// whole ones. `None` if it was stopped.
    pub(super) fn new(
        task: &Task<'_>,
        machine: Option<u32>,
        threshold_s: f64,
        most_behind: usize,
        control: &Control,
    ) -> Option<Self> {
        let (model, cluster) = (task.model, task.cluster);
        let devices = task.most_devices();
        let pairs: usize = model.begins.iter().map(Vec::len).sum();
        let mut splits: Vec<Split> = Vec::new();
        for (count, share) in (0_u32..).zip(&task.share) {
            match (*share, splits.last_mut()) {
                (Some(share), Some(split)) if split.share == share => split.most = count,
                (Some(share), _) => splits.push(Split { share, fewest: count, most: count, rests: Vec::new() }),
                (None, _) => {}
            }
        }
        while splits.len() > 1 && pairs * splits.len() * FEWEST_LEVELS > MOST_WORK {
            // The work of many replicas on the devices of few.
            splits = (splits.chunks(2))
                .map(|two| Split { fewest: two[0].fewest, rests: Vec::new(), ..two[two.len() - 1] })
                .collect();
        }
        let most_levels = (MOST_WORK / (pairs * splits.len()).max(1)).clamp(FEWEST_LEVELS, MOST_LEVELS) as u32;
        let levels: Vec<u32> = if devices <= most_levels {
            (0..=devices).collect()
        } else {
            let part = |level| (u64::from(devices) * u64::from(level)).div_ceil(u64::from(most_levels)) as u32;
            (0..=most_levels).map(part).collect()
        };
        for split in &mut splits {
            split.rests = (0..levels.len())
                .filter(|&level| levels[level] >= split.fewest)
                .map(|level| (level, levels.partition_point(|&other| other < levels[level] - split.fewest)))
                .collect();
        }
        let mut work = pairs * levels.len() * splits.len();
        let machine = machine.map_or(0, |size| size as usize);
        let most_room = if work * (1 + machine / 2) * DEEP <= MOST_WORK { machine } else { 0 };
        work *= 1 + most_room / 2;
        let of_machines = |value: fn(&Machine) -> f64| cluster.machines.iter().map(value);
        let widest = cluster.machines.iter().map(|machine| machine.devices).max().unwrap_or(1);
        let inside = widest > 1;
        let (intra, inter) = (&cluster.intra, &cluster.inter);
        let sources = Sources {
            task,
            threshold_s,
            speed: of_machines(|machine| machine.speed).fold(0.0, f64::max),
            slowest: of_machines(|machine| machine.speed).fold(f64::INFINITY, f64::min),
            memory_bytes: of_machines(|machine| machine.memory_bytes).fold(0.0, f64::max)
                - task.settings.memory.reserved_bytes,
            widest,
            port: inter.bytes_per_s + if inside { intra.bytes_per_s } else { 0.0 },
            latency_s: if inside { inter.latency_s.min(intra.latency_s) } else { inter.latency_s },
            splits,
            levels: levels.len(),
            most_room,
        };
        let mut deepest =
            (MOST_WORK / work.max(1)).clamp(1, model.cuts()).min(task.micro_batches as usize).min(most_behind);
        if work > MOST_WORK / 16 && !sources.is_tight(deepest as u32 + 1) {
            deepest = 1;
        }
        // From the most stages behind a cut to none: each table is made from the one before it.
        let mut least: Vec<Vec<Least>> = Vec::new();
        for behind in (0..=deepest).rev() {
            let mut windows = task.settings.windows(behind as u32 + 1, task.micro_batches);
            if behind == deepest {
                windows.1 = task.micro_batches; // it stands for all that are farther in front
            }
            least.push(sources.table(windows, least.last(), control)?);
        }
        least.reverse();
        Some(Self { levels, most_room, least })
    }

    fn at(&self, cut: usize, free: u32, room: u32, behind: u32) -> &Least {
        let free = free.min(*self.levels.last().expect("there is a level for all devices"));
        let level = if self.levels.len() > free as usize && self.levels[free as usize] == free {
            free as usize
        } else {
            self.levels.partition_point(|&level| level < free)
        };
        let table = &self.least[(behind as usize).min(self.least.len() - 1)];
        &table[(cut * self.levels.len() + level) * (self.most_room + 1) + (room as usize).min(self.most_room)]
    }

    /// The least that any plan takes from its first forward to its last backward.
    pub(super) fn least_s(&self) -> f64 {
        let last = self.least[0].last().expect("there is a level for all devices");
        last.trip_s.max(last.backwards_s).max(last.forwards_s)
    }

    /// The least that stages in front of a cut add to one micro-batch on its way through, with so many stages behind it,
    /// so many devices free, and room for so many on the machine of the stage next to the cut; infinite if none fit.
    pub(super) fn trip_s(&self, cut: usize, free: u32, room: u32, behind: u32) -> f64 {
        self.at(cut, free, room, behind).trip_s
    }

    /// No plan that ends in a suffix with these paths is shorter.
    pub(super) fn bound_s(&self, paths: &Paths, cut: usize, free: u32, room: u32, behind: u32) -> f64 {
        self.at(cut, free, room, behind).sums_s(paths).into_iter().fold(f64::NEG_INFINITY, f64::max)
    }
}

impl Sources<'_> {
    /// Whether a stage fits with one stage behind it, but not with so many.
    fn is_tight(&self, behind: u32) -> bool {
        let task = self.task;
        let window = |behind: u32| task.settings.windows(behind + 1, task.micro_batches).0;
        let micro_batches = f64::from(task.micro_batches);
        self.splits.iter().any(|split| {
            let totals = &task.totals[split.share as usize];
            (1..task.model.cuts()).any(|end| {
                task.model.begins[end].iter().any(|&begin| {
                    let begin = begin as usize;
                    let work_s = totals.forward_s[end] - totals.forward_s[begin] + totals.backward_s[end]
                        - totals.backward_s[begin];
                    let fits = |window| {
                        let memory = &task.settings.memory;
                        cost::memory(task.model, totals, memory, (begin, end), split.most, window, task.recompute)
                            .total_bytes()
                            <= self.memory_bytes
                    };
                    micro_batches * work_s < self.threshold_s * self.speed && fits(window(1)) && !fits(window(behind))
                })
            })
        })
    }

    /// The least that stages in front of each cut add, if the next of them has such a window; given the table for those
    /// farther in front, unless it is this one.
    fn table(
        &self,
        (least_window, most_window): (u32, u32),
        farther: Option<&Vec<Least>>,
        control: &Control,
    ) -> Option<Vec<Least>> {
        let task = self.task;
        let (model, threshold_s) = (task.model, self.threshold_s);
        let memory_model = &task.settings.memory;
        let overlap = task.settings.overlap_sync;
        let micro_batches = f64::from(task.micro_batches);
        let cuts = model.cuts();
        let rooms = self.most_room + 1;
        let entry = |cut: usize, level: usize, room: usize| (cut * self.levels + level) * rooms + room;
        let mut least = vec![Least::NONE; cuts * self.levels * rooms];
        least[..self.levels * rooms].fill(Least::EMPTY);
        for end in 1..cuts {
            if control.should_stop() {
                return None;
            }
            let is_last = end + 1 == cuts;
            for split in &self.splits {
                let totals = &task.totals[split.share as usize];
                let bytes = if is_last { 0.0 } else { task.cut_bytes[end] };
                let (size, fewest) = (self.most_room, split.fewest as usize);
                let link = |s_per_byte: f64, latency_s: f64| if is_last { 0.0 } else { bytes * s_per_byte + latency_s };
                // To devices elsewhere, and what room that leaves beside the stage.
                let inter = &task.cluster.inter;
                let (away_s, left) = if size > 0 && split.most as usize <= size {
                    (link(1.0 / inter.bytes_per_s, inter.latency_s), size - fewest)
                } else {
                    let room = if fewest > size { 0 } else { size };
                    (link(1.0 / (f64::from(split.most) * self.port), self.latency_s), room)
                };
                // To devices of the same machine.
                let intra = &task.cluster.intra;
                let beside_s = link(1.0 / (f64::from(split.most) * intra.bytes_per_s), intra.latency_s);
                let s_per_byte = least_sync_s_per_byte(task.cluster, self.widest, split.fewest);
                let rate = Rate { s_per_byte, latency_s: 0.0 };
                let (mut sync_s, mut begun) = (0.0, end);
                for &begin in &model.begins[end] {
                    let begin = begin as usize;
                    let forward_s = (totals.forward_s[end] - totals.forward_s[begin]) / self.speed;
                    let mut backward_s = (totals.backward_s[end] - totals.backward_s[begin]) / self.speed;
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
                        sync_s = cost::extend_sync(model, totals, self.slowest, layers, rate, overlap, sync_s);
                        begun = begin;
                    } else if self.splits.len() * cuts <= MOST_SYNCED {
                        sync_s = cost::sync_s(model, totals, self.slowest, (begin, end), rate, overlap);
                    }
                    let fits = |window| {
                        cost::memory(model, totals, memory_model, (begin, end), split.most, window, task.recompute)
                            .total_bytes()
                            <= self.memory_bytes
                    };
                    let Some(window) = largest_window(least_window, most_window, fits) else { continue };
                    let ahead = |transfer_s| {
                        FrontStage::new(forward_s, backward_s, sync_s, transfer_s, window, task.micro_batches)
                    };
                    let (away, beside) = (ahead(away_s), ahead(beside_s));
                    let all_s = micro_batches * work_s;
                    for &(level, rest) in &split.rests {
                        let mut place = |room: usize, room_before: usize, stage: &FrontStage| {
                            let before = farther.unwrap_or(&least)[entry(begin, rest, room_before)];
                            // The stage's gradients are summed while earlier stages drain.
                            if all_s + before.trip_s.max(before.fill_s + sync_s) < threshold_s {
                                least[entry(end, level, room)].lower(stage, &before);
                            }
                        };
                        place(0, left, &away);
                        for room in fewest..=size {
                            place(room, room - fewest, &beside);
                        }
                    }
                }
            }
            // More room never harms.
            for room in 1..rooms {
                for level in 0..self.levels {
                    let at = entry(end, level, room);
                    least[at] = least[at].or(&least[at - 1]);
                }
            }
        }
        Some(least)
    }
}

/// No plan has a shorter step: all devices at work all the time, or one micro-batch on its way through.
///
/// Steps of `threshold_s` and more don't count; nor does the micro-batch on its way if time is up.
pub(super) fn least_step_s(task: &Task<'_>, machine: Option<u32>, threshold_s: f64, control: &Control) -> f64 {
    let last = task.model.cuts() - 1;
    let alone_s = Prefixes::new(task, machine, threshold_s, 1, control)
        .map_or(0.0, |prefixes| prefixes.bound_s(&Paths::default(), last, task.cluster.devices(), 0, 0));
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
