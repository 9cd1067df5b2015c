//! Which layers stay together: those that nothing tells apart from a neighbour.
//!
//! A group of layers without time, parameters and saved bytes (a reshape, an index into a tuple, a mask) only multiplies
//! cut points. It joins
//! - the group that feeds it, if nobody else does and the bytes it adds to a cut are at most those it takes away;
//! - the group that reads it, if nobody else does and its own bytes are at least those that feed it;
//! - whichever reader comes first, if nothing feeds it.
//!
//! Each rule turns every chain of cuts into one that is no dearer: the same seconds, parameters and saved bytes in each
//! stage, and no cut with more bytes, so nowhere a larger transfer, buffer or kept input. Only a stage of nothing but such
//! layers is lost.
//!
//! A layer that takes no time but saves bytes is another matter: the stage that holds it must have the memory. It joins by
//! the same rules ([`Joined::Free`]) where nobody asks about memory, or cut points would be too many otherwise.

use super::LayerReaders;
use crate::model::graph::Graph;

/// Layers that enter a down-set together, as positions in ascending order.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LayerUnit {
    /// What enters, including layers that wait for their first reader.
    pub(super) adds: Vec<usize>,
    /// What must be inside before: one of each group.
    pub(super) needs: Vec<usize>,
    /// Units that may become ready once this one is inside.
    pub(super) next: Vec<usize>,
}

/// Which layers may join a neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joined {
    /// None.
    Nothing,
    /// Those without time, parameters and saved bytes.
    Unsaved,
    /// Those without time and parameters.
    Free,
}

/// The units of a graph, in topological order of their first layers.
pub(super) fn of(graph: &Graph, order: &[usize], wires: &LayerReaders, joined: Joined) -> Vec<LayerUnit> {
    let mut groups = Groups::one_for_each_layer(graph, order, wires, joined);
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

struct Groups<'a> {
    graph: &'a Graph,
    order: &'a [usize],
    wires: &'a LayerReaders,
    /// Group of each position.
    group: Vec<usize>,
    /// Positions in each group; empty once it has joined another.
    members: Vec<Vec<usize>>,
    /// Whether it may join another.
    is_free: Vec<bool>,
}

impl<'a> Groups<'a> {
    fn one_for_each_layer(graph: &'a Graph, order: &'a [usize], wires: &'a LayerReaders, joined: Joined) -> Self {
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
            wires,
            group: (0..order.len()).collect(),
            members: (0..order.len()).map(|position| vec![position]).collect(),
            is_free: order.iter().map(is_free).collect(),
        }
    }

    /// Groups at the other ends of `ends` (feeding or reading) of `group`.
    fn neighbours(&self, group: usize, ends: &[Vec<usize>]) -> Vec<usize> {
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

    /// Output bytes of some positions at each batch size.
    fn bytes(&self, positions: &[usize]) -> Vec<f64> {
        (0..self.graph.batch_sizes.len())
            .map(|batch| {
                positions.iter().map(|&at| self.graph.layers[self.order[at]].measured[batch].activation_bytes).sum()
            })
            .collect()
    }

    /// Members of `group` whose outputs are read by another group.
    fn read_outside(&self, group: usize) -> Vec<usize> {
        let is_read = |&member: &usize| self.wires.after[member].iter().any(|&reader| self.group[reader] != group);
        self.members[group].iter().copied().filter(is_read).collect()
    }

    /// Members of `feeder`, the only group that feeds `group`, that nobody reads beyond these two.
    fn read_only_by(&self, group: usize, feeder: usize) -> Vec<usize> {
        let is_freed = |&member: &usize| {
            let mut readers = self.wires.after[member].iter().map(|&reader| self.group[reader]);
            readers.all(|reader| reader == group || reader == feeder)
        };
        self.sources_of(group).into_iter().filter(is_freed).collect()
    }

    /// Layers outside `group` that feed it.
    fn sources_of(&self, group: usize) -> Vec<usize> {
        let feeding = self.members[group].iter().flat_map(|&member| &self.wires.before[member]).copied();
        let mut sources: Vec<usize> = feeding.filter(|&source| self.group[source] != group).collect();
        sources.sort_unstable();
        sources.dedup();
        sources
    }

    /// The group that `group` may follow without making a cut dearer.
    fn partner(&self, group: usize) -> Option<usize> {
        let at_most = |these: &[usize], those: &[usize]| {
            self.bytes(these).iter().zip(&self.bytes(those)).all(|(this, that)| this <= that)
        };
        let feeding = self.neighbours(group, &self.wires.before);
        let reading = self.neighbours(group, &self.wires.after);
        let own = self.read_outside(group);
        if feeding.is_empty() && reading.is_empty() {
            return (0..self.members.len()).find(|&other| other != group && !self.members[other].is_empty());
        }
        if let [feeder] = feeding[..]
            && at_most(&own, &self.read_only_by(group, feeder))
        {
            return Some(feeder);
        }
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
        // Free, fed by nothing and read by several: such a group enters with its first reader.
        let waits: Vec<bool> = (0..size)
            .map(|group| {
                self.is_free[group]
                    && !self.members[group].is_empty()
                    && self.neighbours(group, &self.wires.before).is_empty()
                    && !self.neighbours(group, &self.wires.after).is_empty()
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
                for feeder in self.neighbours(group, &self.wires.before) {
                    if waits[feeder] {
                        adds.extend(&self.members[feeder]);
                    } else {
                        needs.push(self.members[feeder][0]); // a group enters as one
                    }
                }
                adds.sort_unstable();
                needs.sort_unstable();
                let next = self.neighbours(group, &self.wires.after).iter().map(|&reader| number[reader]).collect();
                LayerUnit { adds, needs, next }
            })
            .collect()
    }
}
