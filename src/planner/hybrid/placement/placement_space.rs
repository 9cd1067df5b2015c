//! Placements of stages. Occupied devices are represented as a multiset of nodes, not as a set of devices.
//!
//! Nodes of equal size, memory, speed and kind are interchangeable. So a *situation* only counts the nodes of each class by
//! their free devices and by their devices of the stage placed last. Stages are placed from the last one to the first,
//! and a *move* places the next one.

use crate::planner::effort::passes;
use crate::planner::hybrid::{
    bounds::{device_classes::Units, link_bounds::Links},
    subproblem::Subproblem,
};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::cost::Pace;
use crate::cost::network::{Cluster, Node, Rate};

/// Returns for each replica count whether a stage may have it. `totals_index` identifies the samples of each count.
///
/// On large clusters, a stage of whole nodes takes another node only if that lowers its samples per replica.
fn useful(cluster: &Cluster, totals_index: &[Option<u32>]) -> Vec<bool> {
    let size = cluster.nodes.iter().map(|node| node.devices as usize).max().unwrap_or(1);
    let is_large = cluster.devices() > passes::FINE_DEVICES;
    (totals_index.iter().enumerate())
        .map(|(replicas, index_now)| {
            // Compares with the count of one node less. If the samples are equal, the additional node would not speed
            // up the stage.
            index_now.is_some() && !(is_large && replicas > size && *index_now == totals_index[replicas - size])
        })
        .collect()
}

/// A group of `count` nodes with equal class, equal free devices and equal devices of the stage placed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct NodeGroup {
    class: u16,
    free: u32,
    last: u32,
    count: u32,
}

/// A placement of the next stage.
#[derive(Debug, Clone)]
pub(crate) struct PlacementMove {
    /// Situation after the move. In the relaxed space, the value from which that space computes it.
    pub next: u32,
    /// Number of devices it takes.
    pub replicas: u32,
    /// Smallest number of devices, if the move stands for a range of numbers.
    pub fewest: u32,
    /// Transfer rate from the new stage to the one placed before it.
    pub transfer: Rate,
    /// Gradient all-reduce rate of the new stage.
    pub sync: Rate,
    /// Speed of the slowest device that it takes, and the kinds of its devices. No kinds if the move stands for several.
    pub pace: Pace,
    /// Memory of the smallest device that it takes, or an upper bound on it if the move stands for several.
    pub memory_bytes: f64,
    /// Number of the cost class: the combination of replicas, all-reduce rate, pace and memory, which decides the
    /// stage's own costs.
    pub cost_class: u32,
    /// Devices that stay free on its node, or `None` if it takes several nodes.
    pub free_on_node: Option<u32>,
    /// Device class. Only the relaxed space uses it.
    pub device_class: u16,
    /// Nodes that it takes devices of: `(class, free before, devices of the last stage, devices taken, nodes)`.
    pub takes: Vec<(u16, u32, u32, u32, u32)>,
}

/// Cost classes: combinations of devices on which stages with equal layers have equal costs.
#[derive(Debug, Default)]
pub(crate) struct CostClasses {
    known: FxHashMap<[u64; 6], u32>,
}

impl CostClasses {
    /// Returns the number of a cost class, new or known.
    pub(crate) fn of(&mut self, replicas: u32, sync: Rate, pace: Pace, memory_bytes: f64) -> u32 {
        let [s_per_byte, latency_s] = [sync.s_per_byte, sync.latency_s].map(f64::to_bits);
        let next = self.known.len() as u32;
        let [speed, kinds] = pace.key();
        let key = [u64::from(replicas), s_per_byte, latency_s, speed, kinds, memory_bytes.to_bits()];
        *self.known.entry(key).or_insert(next)
    }
}

/// A space of placements: situations of free devices, and moves between them.
pub(crate) trait Placements {
    /// Whether moves are real placements, so that complete labels are plans.
    const IS_REAL: bool;

    /// Free devices of a situation that has no number yet. Most moves are rejected before their situation needs one.
    type FreeDevices: Copy;

    /// Returns bounds on the links of all placements in the space.
    fn links(&self) -> &Links;

    /// Returns the free devices of a situation. Situation 0 is the empty cluster.
    fn rest(&self, situation: u32) -> Self::FreeDevices;

    /// Returns the number of a set of situations. In all of them, each move costs the same and leads into one set.
    fn rivals(&self, situation: u32) -> u32 {
        situation
    }

    /// Returns whether every row of moves that is possible in the situation `other` is possible in `one`, too. Both
    /// are of one set of [`Placements::rivals`].
    fn leaves_as_much(&self, one: u32, other: u32) -> bool {
        one == other
    }

    /// Returns the number of free devices.
    fn free(&self, rest: Self::FreeDevices) -> u32;

    /// Returns an upper bound on the sum of the speeds of the free devices.
    fn free_speed(&self, rest: Self::FreeDevices) -> f64;

    /// Returns an upper bound on the sum of the units of the free devices.
    fn free_units(&self, rest: Self::FreeDevices) -> u32;

    /// Returns all moves from a situation, fewest replicas first.
    fn moves(&mut self, situation: u32) -> Arc<[PlacementMove]>;

    /// Returns the free devices after a move, or `None` if there are not enough for it.
    fn after(&self, situation: u32, choice: &PlacementMove) -> Option<Self::FreeDevices>;

    /// Returns the situation with these free devices.
    fn situation(&mut self, rest: Self::FreeDevices) -> u32;
}

/// All situations that the search has reached, and the moves between them.
pub(crate) struct Space<'a> {
    cluster: &'a Cluster,
    /// Distinct nodes, in order of appearance.
    classes: Vec<Node>,
    /// Index into `classes` for each node.
    class_of: Vec<usize>,
    /// Units of a device of each class.
    units: Vec<u32>,
    situations: Vec<Vec<NodeGroup>>,
    free: Vec<u32>,
    index: FxHashMap<Vec<NodeGroup>, u32>,
    moves: Vec<Option<Arc<[PlacementMove]>>>,
    cost_classes: CostClasses,
    /// Whether the space has every placement, not only node-aligned ones.
    pub exact: bool,
    links: Links,
    /// Whether a stage may have each replica count.
    allowed: Vec<bool>,
}

impl<'a> Space<'a> {
    /// Creates the space with situation 0, in which all devices are free.
    pub(crate) fn new(task: &Subproblem<'a>) -> Self {
        let cluster = task.cluster;
        let (classes, class_of) = cluster.classes();
        let mut start: Vec<NodeGroup> = Vec::new();
        let mut situations_at_most = 1.0;
        for (class, &Node { devices, .. }) in classes.iter().enumerate() {
            let count = class_of.iter().filter(|&&other| other == class).count() as u32;
            start.push(NodeGroup { class: class as u16, free: devices, last: 0, count });
            // The number of multisets of `count` nodes, each with one of the pairs (free, last) with free + last <=
            // devices. This upper bound decides whether all placements can be searched.
            let pairs = f64::from((devices + 1) * (devices + 2)) / 2.0;
            situations_at_most *= (1..=count).map(|n| (pairs - 1.0 + f64::from(n)) / f64::from(n)).product::<f64>();
        }
        // Above this number of situations, exact passes would take too long, and node-aligned placements are searched
        // instead.
        let exact = situations_at_most <= passes::EXACT_SITUATIONS;
        let size = classes.first().map_or(1, |class| class.devices);
        let is_even = classes.iter().all(|class| class.devices == size);
        let whole = !exact && cluster.devices() > passes::FINE_DEVICES && is_even;
        let units = Units::new(task.cluster);
        let mut space = Self {
            cluster,
            units: classes.iter().map(|class| units.of(class.speed)).collect(),
            classes,
            class_of,
            situations: Vec::new(),
            free: Vec::new(),
            index: FxHashMap::default(),
            moves: Vec::new(),
            cost_classes: CostClasses::default(),
            exact,
            links: Links::new(task, whole),
            allowed: useful(cluster, &task.totals_index),
        };
        space.intern(start);
        space
    }

    /// Returns the number of a situation, new or known. `groups` may be unsorted and contain equal groups.
    fn intern(&mut self, mut groups: Vec<NodeGroup>) -> u32 {
        // A canonical form makes equal multisets equal as vectors.
        groups.retain(|group| group.count > 0);
        groups.sort_unstable();
        groups.dedup_by(|b, a| {
            let same = (a.class, a.free, a.last) == (b.class, b.free, b.last);
            if same {
                a.count += b.count;
            }
            same
        });
        if let Some(&known) = self.index.get(&groups) {
            return known;
        }
        let id = self.situations.len() as u32;
        self.free.push(groups.iter().map(|group| group.free * group.count).sum());
        self.situations.push(groups.clone());
        self.moves.push(None);
        self.index.insert(groups, id);
        id
    }

    /// Returns whether the cluster is small enough for stages that begin or end in partly used nodes.
    fn fine(&self) -> bool {
        self.cluster.devices() <= passes::FINE_DEVICES
    }

    /// Returns the number of nodes that may be partly used at a time in node-aligned placements.
    fn open_limit(&self) -> u32 {
        if self.fine() { 2 } else { 1 }
    }

    /// Returns the devices of one node of each class.
    fn sizes(&self) -> Vec<u32> {
        self.classes.iter().map(|class| class.devices).collect()
    }

    /// Returns the move for a choice of devices, or `None` if a stage may not have that number of replicas.
    fn apply(&mut self, groups: &[NodeGroup], choice: &[(usize, u32, u32)]) -> Option<PlacementMove> {
        let replicas: u32 = choice.iter().map(|&(_, taken, nodes)| taken * nodes).sum();
        if replicas == 0 || !self.allowed[replicas as usize] {
            return None;
        }
        let mut rest: Vec<u32> = groups.iter().map(|group| group.count).collect();
        let mut after = Vec::new();
        let mut pairs: Vec<(u32, u32, u32)> = Vec::new();
        let mut takes = Vec::new();
        let (mut nodes, mut widest, mut pace, mut memory_bytes) = (0, 0, Pace::NONE, f64::INFINITY);
        for &(index, taken, count) in choice {
            let group = groups[index];
            rest[index] -= count;
            after.push(NodeGroup { class: group.class, free: group.free - taken, last: taken, count });
            pairs.push((taken, group.last, count));
            takes.push((group.class, group.free, group.last, taken, count));
            nodes += count;
            widest = widest.max(taken);
            let class = self.classes[usize::from(group.class)];
            pace = pace.with(&class);
            memory_bytes = memory_bytes.min(class.memory_bytes);
        }
        // Nodes that this stage leaves alone still matter: the stage behind it may be on them, and then receives there.
        for (group, &count) in groups.iter().zip(&rest) {
            after.push(NodeGroup { last: 0, count, ..*group });
            if group.last > 0 && count > 0 {
                pairs.push((0, group.last, count));
            }
        }
        let free_on_node = match *choice {
            [(index, taken, 1)] => Some(groups[index].free - taken),
            _ => None,
        };
        // The last stage of the pipeline has no stage behind it to send to.
        let first = pairs.iter().all(|&(_, receivers, _)| receivers == 0);
        // A stage with one replica has no all-reduce, and so also pays no latency for it.
        let sync = if replicas > 1 { self.cluster.all_reduce(nodes, widest) } else { Rate::default() };
        Some(PlacementMove {
            transfer: if first { Rate::default() } else { self.cluster.transfer(&pairs) },
            sync,
            cost_class: self.cost_classes.of(replicas, sync, pace, memory_bytes),
            next: self.intern(after),
            replicas,
            fewest: replicas,
            pace,
            memory_bytes,
            free_on_node,
            device_class: 0,
            takes,
        })
    }

    /// Returns the devices of each stage, first stage first, for moves from the last stage to the first.
    ///
    /// Equal nodes are numbered so that device numbers ascend with the stages where possible.
    pub(crate) fn devices(&self, moves: &[PlacementMove]) -> Vec<Vec<(u32, u32)>> {
        let node_count = self.class_of.len();
        let mut free: Vec<u32> = self.cluster.nodes.iter().map(|node| node.devices).collect();
        let mut last = vec![0_u32; node_count];
        let mut stages: Vec<Vec<(u32, u32)>> = Vec::new();
        for step in moves {
            let mut touched = vec![0_u32; node_count];
            // Moves name groups of equal nodes. Any nodes in the right state do, since equal nodes are interchangeable.
            for &(class, was_free, was_last, taken, nodes) in &step.takes {
                let alike: Vec<usize> = (0..node_count)
                    .filter(|&m| {
                        touched[m] == 0
                            && self.class_of[m] == usize::from(class)
                            && free[m] == was_free
                            && last[m] == was_last
                    })
                    .take(nodes as usize)
                    .collect();
                debug_assert_eq!(alike.len(), nodes as usize, "a move is made from its own situation");
                for node in alike {
                    touched[node] = taken;
                    free[node] -= taken;
                }
            }
            stages.push(
                (0_u32..).zip(&touched).filter(|&(_, &count)| count > 0).map(|(node, &count)| (node, count)).collect(),
            );
            last = touched;
        }
        stages.reverse();
        // Renumber the nodes of each class by first appearance.
        let mut name = vec![None; node_count];
        let mut next: Vec<usize> = vec![0; self.classes.len()];
        for stage in &mut stages {
            // Nodes shared with earlier stages keep their numbers. Among new nodes, those with more devices come first.
            let mut order: Vec<(u32, u32)> = stage.clone();
            order.sort_by_key(|&(node, count)| (name[node as usize].is_none(), std::cmp::Reverse(count), node));
            for (node, _) in order {
                if name[node as usize].is_none() {
                    let class = self.class_of[node as usize];
                    let fresh = (next[class]..node_count)
                        .find(|&m| self.class_of[m] == class)
                        .expect("a class has as many names as nodes");
                    next[class] = fresh + 1;
                    name[node as usize] = Some(fresh as u32);
                }
            }
            for entry in stage.iter_mut() {
                entry.0 = name[entry.0 as usize].expect("named above");
            }
            stage.sort_unstable();
        }
        stages
    }
}

impl Placements for Space<'_> {
    const IS_REAL: bool = true;

    type FreeDevices = u32;

    fn links(&self) -> &Links {
        &self.links
    }

    fn rest(&self, situation: u32) -> u32 {
        situation
    }

    fn free(&self, situation: u32) -> u32 {
        self.free[situation as usize]
    }

    fn free_speed(&self, situation: u32) -> f64 {
        let each =
            |group: &NodeGroup| f64::from(group.free * group.count) * self.classes[usize::from(group.class)].speed;
        self.situations[situation as usize].iter().map(each).sum()
    }

    fn free_units(&self, situation: u32) -> u32 {
        let each = |group: &NodeGroup| group.free * group.count * self.units[usize::from(group.class)];
        self.situations[situation as usize].iter().map(each).sum()
    }

    fn moves(&mut self, situation: u32) -> Arc<[PlacementMove]> {
        if let Some(moves) = &self.moves[situation as usize] {
            return moves.clone();
        }
        let groups = self.situations[situation as usize].clone();
        // Each entry states for a group and a number of devices how many of its nodes give that number.
        let mut choices: Vec<DeviceChoice> = Vec::new();
        if self.exact {
            every_choice(&groups, 0, &mut Vec::new(), &mut choices);
        } else {
            node_aligned_choices(&groups, self.open_limit(), self.fine(), &self.sizes(), &mut choices);
        }
        let mut moves: Vec<PlacementMove> =
            choices.into_iter().filter_map(|choice| self.apply(&groups, &choice)).collect();
        // Situations are numbered in the order in which they are reached, so this order is reproducible.
        moves.sort_by(|a, b| a.replicas.cmp(&b.replicas).then(a.next.cmp(&b.next)));
        let moves: Arc<[PlacementMove]> = moves.into();
        self.moves[situation as usize] = Some(moves.clone());
        moves
    }

    fn after(&self, _: u32, choice: &PlacementMove) -> Option<u32> {
        Some(choice.next)
    }

    fn situation(&mut self, situation: u32) -> u32 {
        situation
    }
}

/// Devices that a move takes: `(group, devices taken from each node, nodes)`.
type DeviceChoice = Vec<(usize, u32, u32)>;

/// Adds all choices of devices from the nodes of `groups[at..]` to `choices`, each after the devices in `so_far`.
fn every_choice(groups: &[NodeGroup], at: usize, so_far: &mut DeviceChoice, choices: &mut Vec<DeviceChoice>) {
    match groups.get(at) {
        Some(group) => split_group(groups, at, group.count, group.free, so_far, choices),
        None => choices.push(so_far.clone()),
    }
}

/// Adds all choices in which `nodes` nodes of group `at` give at most `max` devices each. The nodes are equal, so
/// nodes that give more come first, and each multiset is generated once.
fn split_group(
    groups: &[NodeGroup],
    at: usize,
    nodes: u32,
    max: u32,
    so_far: &mut DeviceChoice,
    choices: &mut Vec<DeviceChoice>,
) {
    if nodes == 0 || max == 0 {
        every_choice(groups, at + 1, so_far, choices);
        return;
    }
    split_group(groups, at, nodes, max - 1, so_far, choices);
    for count in 1..=nodes {
        so_far.push((at, max, count));
        split_group(groups, at, nodes - count, max - 1, so_far, choices);
        so_far.pop();
    }
}

/// Adds the node-aligned choices: devices of one node, or whole nodes with a partly used node at either end.
fn node_aligned_choices(
    groups: &[NodeGroup],
    open_limit: u32,
    fine: bool,
    sizes: &[u32],
    choices: &mut Vec<DeviceChoice>,
) {
    let size = |group: &NodeGroup| sizes[usize::from(group.class)];
    let is_open = |group: &NodeGroup| group.free > 0 && group.free < size(group);
    let open: u32 = groups.iter().filter(|group| is_open(group)).map(|group| group.count).sum();
    for (index, group) in groups.iter().enumerate().filter(|(_, group)| group.free > 0) {
        for taken in 1..=group.free {
            let stays_open = taken < group.free;
            // Partly used nodes multiply the situations, so their number is limited after each stage.
            if open + u32::from(stays_open) - u32::from(is_open(group)) <= open_limit {
                choices.push(vec![(index, taken, 1)]);
            }
        }
    }
    for (index, group) in groups.iter().enumerate().filter(|(_, group)| group.free > 0 && !is_open(group)) {
        // A stage of several nodes may begin in a partly used node: then it takes all devices that are free there.
        let begins = std::iter::once(None)
            .chain(groups.iter().enumerate().filter(|(_, begin)| fine && is_open(begin)).map(|(at, _)| Some(at)));
        for begin in begins {
            let begun: DeviceChoice = begin.map(|at| (at, groups[at].free, 1)).into_iter().collect();
            let open_now = open - u32::from(begin.is_some());
            for whole in 1..=group.count {
                if whole > 1 || begin.is_some() {
                    let mut choice = begun.clone();
                    choice.push((index, group.free, whole));
                    choices.push(choice);
                }
                if fine && whole < group.count && open_now < open_limit {
                    for taken in 1..group.free {
                        let mut choice = begun.clone();
                        choice.push((index, group.free, whole));
                        choice.push((index, taken, 1));
                        choices.push(choice);
                    }
                }
            }
            if begin.is_some() && open_now < open_limit {
                for taken in 1..group.free {
                    let mut choice = begun.clone();
                    choice.push((index, taken, 1));
                    choices.push(choice);
                }
            }
        }
    }
}
