//! Starting points of the search for virtual stages: micro-batch sizes, groups of devices, and balanced cuts.

use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::Settings;
use rustc_hash::FxHashSet;
use std::sync::Arc;

use crate::cost::LayerSums;
use crate::cost::network::{Cluster, Node};
use crate::schedule::{Family, Request};

/// All decisions of a plan except its cuts and the final numbers of devices per group.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shape {
    pub(super) micro_batch: u32,
    pub(super) recompute: bool,
    /// Number of stages per device.
    pub(super) virtual_stages_per_rank: u32,
    /// All devices, in the order in which groups take them.
    pub(super) line: Arc<[u32]>,
    /// Initial number of devices of each group.
    pub(super) replicas: Vec<u32>,
    /// Whether this shape is tried on small clusters only, where an order of nodes or a division of the devices may be
    /// the best one that is bad on large clusters.
    pub(super) is_extra: bool,
}

/// An order in which devices are assigned to groups.
struct Line {
    devices: Arc<[u32]>,
    /// Whether devices come from each node in turn. Then the replicas of a group are on many nodes, and each
    /// node has devices of all groups. Otherwise they come node by node, and neighboring groups share a
    /// node where possible.
    is_scattered: bool,
    /// Whether it is tried on small clusters only.
    is_extra: bool,
}

/// Returns the orders worth trying: the fastest nodes first, the fastest last, and those with most memory first. Of few
/// nodes, returns all orders.
///
/// Groups that do not need all devices leave the last ones idle. The result does not depend on the order in which the
/// file lists nodes.
fn lines(cluster: &Cluster) -> Vec<Line> {
    let mut begins = Vec::with_capacity(cluster.nodes.len());
    let mut begin = 0;
    for node in &cluster.nodes {
        begins.push(begin);
        begin += node.devices;
    }
    let ranked = |first: fn(&Node) -> f64, second: fn(&Node) -> f64| {
        let mut nodes: Vec<(&Node, u32)> = cluster.nodes.iter().zip(begins.iter().copied()).collect();
        nodes.sort_by(|(a, _), (b, _)| {
            (first(b).total_cmp(&first(a))).then(second(b).total_cmp(&second(a))).then(b.devices.cmp(&a.devices))
        });
        nodes
    };
    let fastest = ranked(|node| node.speed, |node| node.memory_bytes);
    let slowest = fastest.iter().rev().copied().collect();
    let roomiest = ranked(|node| node.memory_bytes, |node| node.speed);
    let kind = |(node, _): &(&Node, u32)| (node.speed.to_bits(), node.kind, node.memory_bytes.to_bits());
    // On equal nodes all three orders are the same up to numbering.
    let are_alike = fastest.windows(2).all(|two| kind(&two[0]) == kind(&two[1]));
    let others = if fastest.len() <= effort::PERMUTED_NODES { permutations(&fastest) } else { Vec::new() };
    let usual = if are_alike { vec![fastest] } else { vec![fastest, slowest, roomiest] };
    let orders = usual.into_iter().map(|nodes| (nodes, false)).chain(others.into_iter().map(|nodes| (nodes, true)));
    // Groups may end inside a node, so nodes of different sizes differ. Other equal nodes differ in their numbers only.
    let mut kinds = FxHashSet::default();
    let mut lines: Vec<Line> = Vec::new();
    for (nodes, is_extra) in orders {
        let is_new = kinds.insert(nodes.iter().map(|two| (kind(two), two.0.devices)).collect::<Vec<_>>());
        if is_extra && !is_new {
            continue;
        }
        let in_turn: Vec<u32> = nodes.iter().flat_map(|(node, begin)| *begin..begin + node.devices).collect();
        let max = nodes.iter().map(|(node, _)| node.devices).max().unwrap_or(0);
        let scattered = (0..max)
            .flat_map(|at| nodes.iter().filter(move |(m, _)| at < m.devices).map(move |(_, begin)| begin + at))
            .collect();
        for (devices, is_scattered) in [(in_turn, false), (scattered, true)] {
            if lines.iter().all(|line| *line.devices != devices[..]) {
                lines.push(Line { devices: devices.into(), is_scattered, is_extra });
            }
        }
    }
    lines
}

/// Returns all orders of some values.
fn permutations<T: Copy>(values: &[T]) -> Vec<Vec<T>> {
    if values.is_empty() {
        return vec![Vec::new()];
    }
    let with_first = |first: usize| {
        let others: Vec<T> = [&values[..first], &values[first + 1..]].concat();
        permutations(&others).into_iter().map(move |rest| std::iter::once(values[first]).chain(rest).collect())
    };
    (0..values.len()).flat_map(with_first).collect()
}

/// Returns a line of nested cuts: all cuts of a chain; in a branching model each cut that contains the previous one.
pub(super) fn row(model: &LayerSums) -> Vec<usize> {
    let mut row = vec![0];
    for cut in 1..model.cuts() {
        let last = row[row.len() - 1];
        if model.is_inside(last, cut) {
            row.push(cut);
        }
    }
    row
}

/// Returns every shape worth an attempt, for a model with this number of layers, or of parts that can't be cut.
pub(super) fn shapes(
    cluster: &Cluster,
    settings: &Settings,
    family: &Family,
    (virtual_stages_per_rank, sizes): (&[u32], &[u32]),
    layers: usize,
) -> Vec<Shape> {
    let devices = cluster.devices();
    let lines = lines(cluster);
    let is_nearer_faster =
        cluster.intra.bytes_per_s >= cluster.inter.bytes_per_s && cluster.intra.latency_s <= cluster.inter.latency_s;
    let mut shapes: Vec<Shape> = Vec::new();
    for &micro_batch in sizes {
        let micro_batches = settings.global_batch / micro_batch;
        for (ranks, is_usual_depth) in depths(devices, layers as u32) {
            for &virtual_stages_per_rank in virtual_stages_per_rank {
                let stages = u64::from(ranks) * u64::from(virtual_stages_per_rank);
                let request = Request {
                    virtual_stages_per_rank: Some(virtual_stages_per_rank),
                    ..Request::new(ranks, micro_batches)
                };
                // Reject shapes without cuts, and shapes with more actions than are simulated.
                if stages > layers as u64
                    || stages > u64::from(settings.max_stages)
                    || 3 * stages * u64::from(micro_batches) > effort::MAX_ACTIONS
                    || family.sizes(&request).is_err()
                {
                    continue;
                }
                let usual = replicas(settings, micro_batch, devices, ranks);
                let extra = other_replicas(settings, micro_batch, devices, ranks, &usual);
                let all = usual.into_iter().map(|usual| (usual, false)).chain(extra.into_iter().map(|e| (e, true)));
                for (replicas, is_extra) in all {
                    for line in &lines {
                        if line.is_scattered && replicas[0] == 1 && is_nearer_faster {
                            continue; // scattering single devices would put neighboring groups on different nodes
                        }
                        shapes.extend(settings.uniform_recompute().into_iter().map(|recompute| Shape {
                            micro_batch,
                            recompute,
                            virtual_stages_per_rank,
                            line: Arc::clone(&line.devices),
                            replicas: replicas.clone(),
                            is_extra: is_extra || line.is_extra || !is_usual_depth,
                        }));
                    }
                }
            }
        }
    }
    shapes
}

/// Returns the numbers of groups worth trying: powers of two, and divisors of the number of devices, and on few devices
/// all numbers. The flag states whether the number is tried on many devices, too.
fn depths(devices: u32, max: u32) -> Vec<(u32, bool)> {
    let usual = |ranks: u32| ranks.is_power_of_two() || devices.is_multiple_of(ranks);
    let all = (2..=max.min(devices)).map(|ranks| (ranks, usual(ranks)));
    all.filter(|&(_, is_usual)| is_usual || devices <= effort::LISTED_DEVICES).collect()
}

/// Returns the numbers of devices per group that are tried: the largest equal number that can share a micro-batch, one
/// more for the first groups if devices are left over, and one for each group with the other devices idle.
fn replicas(settings: &Settings, micro_batch: u32, devices: u32, ranks: u32) -> Vec<Vec<u32>> {
    let even = devices / ranks;
    let Some(each) = (1..=even).rev().find(|&each| settings.samples_per_replica(micro_batch, each).is_some()) else {
        return Vec::new();
    };
    let mut all = vec![vec![each; ranks as usize]];
    let left = devices % ranks;
    if each == even
        && left > 0
        && !settings.equal_replicas
        && settings.samples_per_replica(micro_batch, even + 1).is_some()
    {
        all.push((0..ranks).map(|rank| even + u32::from(rank < left)).collect());
    }
    if each > 1 && settings.samples_per_replica(micro_batch, 1).is_some() {
        all.push(vec![1; ranks as usize]);
    }
    all
}

/// Returns all numbers of devices per group that are not in `usual`, or none if there are too many devices.
fn other_replicas(
    settings: &Settings,
    micro_batch: u32,
    devices: u32,
    ranks: u32,
    usual: &[Vec<u32>],
) -> Vec<Vec<u32>> {
    if devices > effort::LISTED_DEVICES || settings.equal_replicas {
        return Vec::new();
    }
    let mut all: Vec<Vec<u32>> = vec![Vec::new()];
    for _ in 0..ranks {
        let longer = |counts: Vec<u32>| {
            let left = devices - counts.iter().sum::<u32>();
            (1..=left).map(move |count| [&counts[..], &[count]].concat())
        };
        all = all.into_iter().flat_map(longer).collect();
    }
    let can_share = |&each: &u32| settings.samples_per_replica(micro_batch, each).is_some();
    all.retain(|counts| counts.iter().all(can_share) && !usual.contains(counts));
    all
}

/// Returns positions in the line of cuts around each stage such that the longest stage is as short as possible.
///
/// `seconds_before[stage]` holds the seconds of all layers before each position, on the devices of that stage. Each
/// stage needs at least one layer.
pub(super) fn balanced(seconds_before: &[&[f64]]) -> Vec<usize> {
    let stages = seconds_before.len();
    let last = seconds_before[0].len() - 1;
    // For a given limit, each stage takes all layers that fit, but leaves at least one for each stage behind it.
    let ends = |limit_s: f64| {
        let mut ends = Vec::with_capacity(stages + 1);
        ends.push(0);
        for (stage, before) in seconds_before.iter().enumerate() {
            let begin = ends[stage];
            let full = before.partition_point(|&seconds| seconds <= before[begin] + limit_s) - 1;
            ends.push(full.min(last - (stages - 1 - stage)).max(begin + 1));
        }
        ends
    };
    let longest = |ends: &[usize]| {
        ends.windows(2).zip(seconds_before).map(|(two, before)| before[two[1]] - before[two[0]]).fold(0.0, f64::max)
    };
    let whole = seconds_before.iter().map(|before| before[last]).fold(0.0, f64::max);
    let (mut low_s, mut high_s) = (0.0, whole);
    // Fifty halvings reach the precision of an f64.
    for _ in 0..50 {
        let middle_s = low_s + (high_s - low_s) / 2.0;
        let found = ends(middle_s);
        if found[stages] >= last && longest(&found) <= middle_s {
            high_s = middle_s;
        } else {
            low_s = middle_s;
        }
    }
    // The last stage takes all remaining layers, even if rounding made the limit slightly too small.
    let mut found = ends(high_s);
    found[stages] = last;
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the shortest possible longest stage, by trying all cuts.
    fn min_longest_s(seconds: &[f64], stages: usize) -> f64 {
        if stages == 1 {
            return seconds.iter().sum();
        }
        (1..=seconds.len() + 1 - stages)
            .map(|first| {
                let head: f64 = seconds[..first].iter().sum();
                head.max(min_longest_s(&seconds[first..], stages - 1))
            })
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn balanced_cuts_have_the_shortest_longest_stage() {
        let seconds = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0];
        let mut before = vec![0.0];
        for second in seconds {
            before.push(before[before.len() - 1] + second);
        }
        for stages in [1, 2, 3, 5, 8] {
            let ends = balanced(&vec![&before[..]; stages]);
            assert_eq!((ends.len(), ends[0], ends[stages]), (stages + 1, 0, seconds.len()));
            assert!(ends.windows(2).all(|two| two[0] < two[1]), "{ends:?}");
            let longest = ends.windows(2).map(|two| before[two[1]] - before[two[0]]).fold(0.0, f64::max);
            assert!((longest - min_longest_s(&seconds, stages)).abs() < 1e-9, "{ends:?}");
        }
    }
}
