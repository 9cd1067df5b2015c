//! The order in which layers run backward: the same for every order of lines in the file.
//!
//! Independent branches may run backward in any order, and each layer's gradients are summed over the replicas as soon
//! as they are there: what is still to be sent when the pass ends depends on that order. Gradients that are many for the
//! time it takes to make them go first. Among layers that are ready (all their readers have run), the next one is that
//! whose gradients, with those of layers behind it that only become ready by it, come at the highest *rate*: bytes for
//! each second of backward pass. So Smith's rule (1956) for the smallest sum of bytes × time says of single jobs, and
//! Horn (1972) of trees, where a job brings along those behind it as long as that raises its rate. In a graph a layer with
//! several readers counts for each of them in equal parts.
//!
//! Equal rates: the layer whose readers ran last, so that a branch runs to its end; then what costs and structure above
//! it say; then its id. Where in the file it stands never counts, but for layers without ids.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;

use super::graph::Graph;
use crate::error::Result;

/// Gradients and the time that it takes to make them: bytes, seconds.
#[derive(Debug, Clone, Copy)]
struct Work {
    bytes: f64,
    backward_s: f64,
}

impl Work {
    /// Bytes for each second; infinite for gradients that take no time, and none without gradients.
    fn rate(self) -> f64 {
        if self.bytes > 0.0 { self.bytes / self.backward_s } else { 0.0 }
    }
}

/// What decides between layers that are ready; the largest runs first.
#[derive(PartialEq, PartialOrd)]
struct Claim<'a> {
    rate: f64,
    /// Places of its readers in the backward pass, the last one first.
    readers: Vec<usize>,
    above: u64,
    id: &'a str,
    layer: usize,
}

impl Eq for Claim<'_> {}

impl Ord for Claim<'_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.partial_cmp(other).expect("rates are numbers")
    }
}

/// Indices of `graph.layers` so that every edge goes forward: the backward pass runs them from the last to the first.
///
/// # Errors
/// As [`Graph::topological_order`].
pub(crate) fn of(graph: &Graph) -> Result<Vec<usize>> {
    let count = graph.layers.len();
    let forward = graph.topological_order()?;
    let (mut before, mut after) = (vec![Vec::new(); count], vec![Vec::new(); count]);
    for &(from, to) in &graph.edges {
        before[to].push(from);
        after[from].push(to);
    }
    for ends in before.iter_mut().chain(&mut after) {
        ends.sort_unstable();
        ends.dedup();
    }
    let mut work = vec![Work { bytes: 0.0, backward_s: 0.0 }; count];
    let mut above = vec![0_u64; count];
    for &layer in &forward {
        let shared = |&feeder: &usize| {
            let (Work { bytes, backward_s }, readers) = (work[feeder], after[feeder].len() as f64);
            Work { bytes: bytes / readers, backward_s: backward_s / readers }
        };
        let mut brought: Vec<Work> = before[layer].iter().map(shared).collect();
        brought.sort_by(|a, b| b.rate().total_cmp(&a.rate()).then(b.bytes.total_cmp(&a.bytes)));
        let backward_s = graph.layers[layer].measured.iter().map(|at| at.backward_s).sum();
        let own = Work { bytes: graph.layers[layer].parameter_bytes, backward_s };
        work[layer] = brought.into_iter().fold(own, |all, more| {
            let raises = more.rate() > all.rate();
            let with = Work { bytes: all.bytes + more.bytes, backward_s: all.backward_s + more.backward_s };
            if raises { with } else { all }
        });
        above[layer] = hash(graph, layer, before[layer].iter().map(|&feeder| above[feeder]));
    }
    let claim = |layer: usize, place: &[usize]| {
        let mut readers: Vec<usize> = after[layer].iter().map(|&reader| place[reader]).collect();
        readers.sort_unstable_by_key(|&reader| Reverse(reader));
        Claim { rate: work[layer].rate(), readers, above: above[layer], id: &graph.layers[layer].id, layer }
    };
    let mut place = vec![usize::MAX; count];
    let mut waiting: Vec<usize> = after.iter().map(Vec::len).collect();
    let mut ready: BinaryHeap<Claim<'_>> =
        (0..count).filter(|&layer| waiting[layer] == 0).map(|layer| claim(layer, &place)).collect();
    let mut backward = Vec::with_capacity(count);
    while let Some(Claim { layer, .. }) = ready.pop() {
        place[layer] = backward.len();
        backward.push(layer);
        for &feeder in &before[layer] {
            waiting[feeder] -= 1;
            if waiting[feeder] == 0 {
                ready.push(claim(feeder, &place));
            }
        }
    }
    backward.reverse();
    Ok(backward)
}

/// A number for a layer's costs and those of all that it depends on.
fn hash(graph: &Graph, layer: usize, feeders: impl Iterator<Item = u64>) -> u64 {
    let mut hasher = FxHasher::default();
    let layer = &graph.layers[layer];
    layer.parameter_bytes.to_bits().hash(&mut hasher);
    for at in &layer.measured {
        for number in [at.forward_s, at.backward_s, at.activation_bytes, at.saved_bytes] {
            number.to_bits().hash(&mut hasher);
        }
    }
    let mut feeders: Vec<u64> = feeders.collect();
    feeders.sort_unstable();
    feeders.hash(&mut hasher);
    hasher.finish()
}
