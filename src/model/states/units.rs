//! Groups of layers that always stay together, because no plan gains from a cut between them.
//!
//! A group of layers without time, parameters and saved bytes (a reshape, an index into a tuple, a mask) only
//! multiplies cut points. It joins
//! - the group that feeds it, if no other group does and the bytes it adds to a cut are at most the bytes it removes;
//! - the group that reads it, if no other group does and its own bytes are at least the bytes that feed it;
//! - its first reader in any order, if nothing feeds it.
//!
//! Each rule maps every chain of cuts to one that costs no more: each stage has the same seconds, parameters and saved
//! bytes, and no cut has more bytes, so no transfer, buffer or kept input grows. Only a stage that consists of nothing
//! but such layers is lost.
//!
//! A layer that takes no time but saves bytes is different, since the stage that holds it needs the memory. It joins by
//! the same rules ([`Joined::Free`]) if the caller does not consider memory, or if there would be too many cut points.

use super::LayerReaders;
use crate::model::graph::Graph;

/// Layers that enter a down-set together. Each layer is a position in the topological order.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LayerUnit {
    /// Layers that enter, in ascending order, including layers that enter with their first reader.
    pub(super) adds: Vec<usize>,
    /// Layers that must be inside before: one of each group that feeds this unit.
    pub(super) needs: Vec<usize>,
    /// Units that may become ready once this one is inside.
    pub(super) next: Vec<usize>,
}

/// Rule that selects the layers that may join a neighbor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joined {
    /// No layer joins a neighbor.
    Nothing,
    /// Layers without time, parameters and saved bytes.
    Unsaved,
    /// Layers without time and parameters. They may save bytes.
    Free,
}

/// Returns the units of a graph, in topological order of their first layers.
pub(super) fn of(graph: &Graph, order: &[usize], readers: &LayerReaders, joined: Joined) -> Vec<LayerUnit> {
    let mut groups = Groups::one_for_each_layer(graph, order, readers, joined);
    // Joining two groups changes the neighbors of others, which may then join as well. Repeat until nothing changes.
    loop {
        let mut any = false;
        for group in 0..order.len() {
            any |= groups.try_to_join(group);
        }
        if !any {
            return groups.into_units();
        }
    }
}

/// The groups of layers while they are being joined.
struct Groups<'a> {
    graph: &'a Graph,
    order: &'a [usize],
    readers: &'a LayerReaders,
    /// Group of each position.
    group: Vec<usize>,
    /// Positions in each group; empty once it has joined another.
    members: Vec<Vec<usize>>,
    /// Whether the group may join another.
    is_free: Vec<bool>,
}

impl<'a> Groups<'a> {
    fn one_for_each_layer(graph: &'a Graph, order: &'a [usize], readers: &'a LayerReaders, joined: Joined) -> Self {
        let is_free = |&layer: &usize| {
            let layer = &graph.layers[layer];
            let takes_no_time = layer.measured.iter().all(|at| at.forward_s == 0.0 && at.backward_s == 0.0);
            let saves_nothing = layer.measured.iter().all(|at| at.saved_bytes == 0.0);
            match joined {
                Joined::Nothing => false,
                Joined::Unsaved => layer.parameter_bytes == 0.0 && takes_no_time && saves_nothing,
                Joined::Free => layer.parameter_bytes == 0.0 && takes_no_time,
            }
        };
        Self {
            graph,
            order,
            readers,
            group: (0..order.len()).collect(),
            members: (0..order.len()).map(|position| vec![position]).collect(),
            is_free: order.iter().map(is_free).collect(),
        }
    }

    /// Returns the groups that feed or read `group`: the groups at the other ends of `ends`.
    fn neighbors(&self, group: usize, ends: &[Vec<usize>]) -> Vec<usize> {
        let mut found: Vec<usize> = self.members[group]
            .iter()
            .flat_map(|&member| &ends[member])
            .map(|&other| self.group[other])
            .filter(|&other| other != group)
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Returns the summed output bytes of `positions` at each batch size.
    fn bytes(&self, positions: &[usize]) -> Vec<f64> {
        (0..self.graph.batch_sizes.len())
            .map(|batch| {
                positions.iter().map(|&at| self.graph.layers[self.order[at]].measured[batch].activation_bytes).sum()
            })
            .collect()
    }

    /// Returns the members of `group` whose outputs another group reads.
    fn read_outside(&self, group: usize) -> Vec<usize> {
        let is_read = |&member: &usize| self.readers.after[member].iter().any(|&reader| self.group[reader] != group);
        self.members[group].iter().copied().filter(is_read).collect()
    }

    /// Returns the members of `feeder`, the only group that feeds `group`, that no third group reads.
    fn read_only_by(&self, group: usize, feeder: usize) -> Vec<usize> {
        let is_freed = |&member: &usize| {
            let mut readers = self.readers.after[member].iter().map(|&reader| self.group[reader]);
            readers.all(|reader| reader == group || reader == feeder)
        };
        self.sources_of(group).into_iter().filter(is_freed).collect()
    }

    /// Returns the layers outside `group` that feed it.
    fn sources_of(&self, group: usize) -> Vec<usize> {
        let feeding = self.members[group].iter().flat_map(|&member| &self.readers.before[member]).copied();
        let mut sources: Vec<usize> = feeding.filter(|&source| self.group[source] != group).collect();
        sources.sort_unstable();
        sources.dedup();
        sources
    }

    /// Returns the group that `group` may join without making a cut more expensive.
    fn partner(&self, group: usize) -> Option<usize> {
        let at_most = |these: &[usize], those: &[usize]| {
            self.bytes(these).iter().zip(&self.bytes(those)).all(|(this, that)| this <= that)
        };
        let feeding = self.neighbors(group, &self.readers.before);
        let reading = self.neighbors(group, &self.readers.after);
        let own = self.read_outside(group);
        // An isolated group never crosses a cut, so it may join any other.
        if feeding.is_empty() && reading.is_empty() {
            return (0..self.members.len()).find(|&other| other != group && !self.members[other].is_empty());
        }
        // Behind its only feeder, the group adds its outputs to a cut and removes the inputs that only it reads.
        if let [feeder] = feeding[..]
            && at_most(&own, &self.read_only_by(group, feeder))
        {
            return Some(feeder);
        }
        // In front of its only reader, moving the group behind the cut replaces its outputs by its inputs there.
        if let [reader] = reading[..]
            && at_most(&self.sources_of(group), &own)
        {
            return Some(reader);
        }
        None
    }

    fn try_to_join(&mut self, group: usize) -> bool {
        if !self.is_free[group] || self.members[group].is_empty() {
            return false;
        }
        let Some(partner) = self.partner(group) else { return false };
        let moved = std::mem::take(&mut self.members[group]);
        for &member in &moved {
            self.group[member] = partner;
        }
        self.members[partner].extend(moved);
        true
    }

    fn into_units(self) -> Vec<LayerUnit> {
        let size = self.order.len();
        // A free group without feeders that several groups read cannot join any of them: a cut may separate the
        // readers. It enters the down-set together with the first reader instead.
        let waits: Vec<bool> = (0..size)
            .map(|group| {
                self.is_free[group]
                    && !self.members[group].is_empty()
                    && self.neighbors(group, &self.readers.before).is_empty()
                    && !self.neighbors(group, &self.readers.after).is_empty()
            })
            .collect();
        let mut number = vec![usize::MAX; size];
        let mut enters: Vec<usize> =
            (0..size).filter(|&group| !self.members[group].is_empty() && !waits[group]).collect();
        enters.sort_by_key(|&group| self.members[group].iter().min().copied());
        for (unit, &group) in enters.iter().enumerate() {
            number[group] = unit;
        }
        enters
            .iter()
            .map(|&group| {
                let mut adds = self.members[group].clone();
                let mut needs = Vec::new();
                for feeder in self.neighbors(group, &self.readers.before) {
                    if waits[feeder] {
                        adds.extend(&self.members[feeder]);
                    } else {
                        needs.push(self.members[feeder][0]); // one member is enough, since a group enters as a whole
                    }
                }
                adds.sort_unstable();
                needs.sort_unstable();
                let next = self.neighbors(group, &self.readers.after).iter().map(|&reader| number[reader]).collect();
                LayerUnit { adds, needs, next }
            })
            .collect()
    }
}
