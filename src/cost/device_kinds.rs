//! Times of layers on several kinds of devices.
//!
//! A layer bound by memory does not gain as much from a faster device as a matrix multiplication does, so one speed for
//! all layers is not enough on a mixed cluster. Each kind has its own time of every layer. The search sees two things:
//!
//! - *Exact times* of a stage: the sums over its layers on each kind among its devices, of which the slowest counts.
//! - *Bounding times*, for bounds over devices that are not known yet: kind *k* has a speed *v(k)*, and a layer takes
//!   *b(l)* = min *v(k) t(k, l)* at speed 1, so *t(k, l)* ≥ *b(l)* / *v(k)* for any choice of speeds.
//!
//! Each speed is that of the whole model, so kinds that differ by one factor are bounded exactly.

use super::layer_sums::{Halves, LayerSums};
use super::network::{Cluster, Node};
use crate::error::{Error, Result};
use crate::model::graph::{Graph, Measurement};
use crate::model::states::CutPoints;

/// Largest number of kinds of devices in a cluster, since a stage stores its kinds as bits of one number.
pub const MAX_KINDS: usize = 64;

/// Times of one device type: one list for each layer of the graph, with one measurement for each batch size. Sizes in
/// bytes are not read.
pub type TypeTimes = Vec<Vec<Measurement>>;

/// Devices of a stage as far as they decide its times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Lowest speed of the devices.
    pub speed: f64,
    /// Kinds of the devices as a set of bits. 0 stands for devices of unknown kind, which have bounding times.
    pub kinds: u64,
}

impl Pace {
    /// The pace of a stage without devices.
    pub const NONE: Self = Self { speed: f64::INFINITY, kinds: 0 };

    /// Returns devices of unknown kind, whose slowest one has this speed.
    #[must_use]
    pub fn at_speed(speed: f64) -> Self {
        Self { speed, kinds: 0 }
    }

    /// Returns the pace of these devices and the devices of a node.
    #[must_use]
    pub fn with(self, node: &Node) -> Self {
        Self { speed: self.speed.min(node.speed), kinds: self.kinds | 1 << node.kind }
    }

    /// Returns numbers that are equal for equal paces.
    #[must_use]
    pub fn key(self) -> [u64; 2] {
        [self.speed.to_bits(), self.kinds]
    }
}

/// Kinds of devices of a cluster that differ by more than one speed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DeviceKinds {
    /// Bounding times of each layer at each batch size.
    bounding: TypeTimes,
    /// Exact times of each kind. Empty if bounding times are exact.
    exact: Vec<TypeTimes>,
}

impl DeviceKinds {
    /// Returns the kinds of devices in `cluster`, and the cluster whose nodes state their kind and its speed.
    ///
    /// `types` has the times of each device type. `type_of` has the index of each node's type in it, or `None` if the
    /// profile has no times of that type: then its own times are divided by the node's speed. Without a node with a
    /// type, there are no kinds, and the cluster stays as it is.
    ///
    /// # Errors
    /// Returns [`Error::Cluster`] for more than [`MAX_KINDS`] kinds.
    pub fn of(
        graph: &Graph,
        types: &[TypeTimes],
        cluster: Cluster,
        type_of: &[Option<u32>],
    ) -> Result<(Option<Self>, Cluster)> {
        if type_of.iter().all(Option::is_none) {
            return Ok((None, cluster));
        }
        let own: TypeTimes = graph.layers.iter().map(|layer| layer.measured.clone()).collect();
        let mut exact: Vec<TypeTimes> = Vec::new();
        let mut speeds = Vec::new();
        let mut known: Vec<(Option<u32>, u64)> = Vec::new();
        let mut kind_of_known: Vec<usize> = Vec::new();
        let mut nodes = Vec::with_capacity(cluster.nodes.len());
        for (node, &of_type) in cluster.nodes.iter().zip(type_of) {
            // The speed of a type that was measured is not read.
            let key = (of_type, if of_type.is_some() { 0 } else { node.speed.to_bits() });
            let at = known.iter().position(|other| *other == key).unwrap_or_else(|| {
                let (times, speed) = match of_type {
                    Some(index) => (types[index as usize].clone(), speed_of(&own, &types[index as usize])),
                    None => (scaled(&own, 1.0 / node.speed), node.speed),
                };
                // Types with equal times are one kind, so that they cost no more than one.
                let kind = exact.iter().position(|other| *other == times).unwrap_or_else(|| {
                    exact.push(times);
                    speeds.push(speed);
                    exact.len() - 1
                });
                known.push(key);
                kind_of_known.push(kind);
                known.len() - 1
            });
            let kind = kind_of_known[at];
            if kind >= MAX_KINDS {
                return Err(Error::cluster(
                    format!("the cluster has more than {MAX_KINDS} kinds of devices, by type and speed"),
                    "give devices of similar speed the same speed, or use a profile with times of one type",
                ));
            }
            nodes.push(Node { kind: kind as u32, speed: speeds[kind], ..*node });
        }
        let cluster = Cluster { nodes, ..cluster };
        if let [_] = exact[..] {
            // Devices of a single kind have its times at speed 1.
            let nodes = cluster.nodes.iter().map(|node| Node { kind: 0, speed: 1.0, ..*node }).collect();
            let bounding = exact.swap_remove(0);
            return Ok((Some(Self { bounding, exact: Vec::new() }), Cluster { nodes, ..cluster }));
        }
        // Rounding must not lift a bounding time divided by its speed above the exact one.
        let down = 1.0 - 4.0 * f64::EPSILON;
        let of_kinds: Vec<TypeTimes> =
            exact.iter().zip(&speeds).map(|(times, speed)| scaled(times, speed * down)).collect();
        let bounding = (0..graph.layers.len())
            .map(|layer| {
                (0..graph.batch_sizes.len())
                    .map(|batch| {
                        let each = of_kinds.iter().map(|times| times[layer][batch]);
                        each.reduce(shorter).unwrap_or_default()
                    })
                    .collect()
            })
            .collect();
        Ok((Some(Self { bounding, exact }), cluster))
    }

    /// Returns the sums of `graph` for the cuts that `states` lists, with the times of these kinds.
    #[must_use]
    pub fn sums(&self, graph: &Graph, states: &CutPoints) -> LayerSums {
        let mut sums = LayerSums::new(graph, states);
        let order = states.order();
        for batch in 0..graph.batch_sizes.len() {
            let of = |times: &TypeTimes| -> Vec<Measurement> { order.iter().map(|&at| times[at][batch]).collect() };
            sums.set_times(batch, &of(&self.bounding), self.exact.iter().map(of));
        }
        sums
    }
}

/// Seconds of the layers below each cut on one kind of device, for one number of samples.
#[derive(Debug, Clone, Default)]
pub struct PassTimes {
    /// Seconds of forward passes, summed over the layers below each cut.
    pub forward_s: Vec<f64>,
    /// Seconds of backward passes, summed over the layers below each cut.
    pub backward_s: Vec<f64>,
    /// Backward seconds of each layer, in topological order (not a sum).
    pub layer_backward_s: Vec<f64>,
    /// Input-gradient and weight-gradient seconds, if any layer of any kind has measurements of them.
    pub halves: Option<Halves>,
}

/// Times of a stage's layers on one kind among its devices: the sums below each cut, which are divided by a speed.
#[derive(Debug, Clone, Copy)]
pub struct Passes<'a> {
    /// Seconds of forward passes, summed over the layers below each cut.
    pub forward_s: &'a [f64],
    /// Seconds of backward passes, summed over the layers below each cut.
    pub backward_s: &'a [f64],
    /// Backward seconds of each layer, in topological order (not a sum).
    pub layer_backward_s: &'a [f64],
    /// Input-gradient and weight-gradient seconds.
    pub halves: Option<&'a Halves>,
    /// Speed by which all times are divided.
    pub speed: f64,
}

impl Passes<'_> {
    /// Returns the seconds of the layers between two cuts, from the sums `below` each cut.
    #[must_use]
    pub fn between(&self, below: &[f64], (begin, end): (usize, usize)) -> f64 {
        // Sums below two cuts round differently, so the difference for layers of almost no time could be negative.
        (below[end] - below[begin]).max(0.0) / self.speed
    }

    /// Returns the forward seconds of the layers between two cuts.
    #[must_use]
    pub fn forward_between_s(&self, cuts: (usize, usize)) -> f64 {
        self.between(self.forward_s, cuts)
    }

    /// Returns the backward seconds of the layers between two cuts.
    #[must_use]
    pub fn backward_between_s(&self, cuts: (usize, usize)) -> f64 {
        self.between(self.backward_s, cuts)
    }
}

/// Returns the speed of a type relative to the profile's own times: the ratio of the sums over all layers.
fn speed_of(own: &TypeTimes, times: &TypeTimes) -> f64 {
    let sum_s = |times: &TypeTimes| times.iter().flatten().map(|at| at.forward_s + at.backward_s).sum::<f64>();
    let speed = sum_s(own) / sum_s(times);
    // Any speed is valid. A model that takes no time on one of both has no ratio.
    if speed.is_finite() && speed > 0.0 { speed } else { 1.0 }
}

/// Returns the times multiplied by a factor.
fn scaled(times: &TypeTimes, by: f64) -> TypeTimes {
    let one = |at: &Measurement| Measurement {
        forward_s: at.forward_s * by,
        backward_s: at.backward_s * by,
        halves_s: at.halves_s.map(|(input_s, weight_s)| (input_s * by, weight_s * by)),
        ..*at
    };
    times.iter().map(|layer| layer.iter().map(one).collect()).collect()
}

/// Returns the shorter time of each pass.
fn shorter(a: Measurement, b: Measurement) -> Measurement {
    let halves = |at: Measurement| at.halves_s.unwrap_or((at.backward_s / 2.0, at.backward_s / 2.0));
    let ((a_input_s, a_weight_s), (b_input_s, b_weight_s)) = (halves(a), halves(b));
    let backward_s = a.backward_s.min(b.backward_s);
    let has_halves = a.halves_s.is_some() || b.halves_s.is_some();
    Measurement {
        forward_s: a.forward_s.min(b.forward_s),
        backward_s,
        // A weight gradient that is not longer than the backward keeps bounds true for schedules that split it
        // (docs/proofs.md#kinds-of-devices).
        halves_s: has_halves.then(|| (a_input_s.min(b_input_s), a_weight_s.min(b_weight_s).min(backward_s))),
        ..a
    }
}
