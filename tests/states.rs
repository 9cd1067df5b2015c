//! Cut points of layer graphs against brute force.

#![allow(missing_docs, clippy::float_cmp)]

use hpgo::Error;
use hpgo::model::graph::{Graph, Layer, Measurement};
use hpgo::model::states::{CutPoints, Cuts, DEFAULT_BOUND};
use proptest::prelude::*;

/// A graph whose layer k costs 2^k seconds unless `free[k]`, so equal sums mean equal sets of costly layers.
fn graph(free: &[bool], bytes: &[u32], edges: &[(usize, usize)]) -> Graph {
    let layers = (0..free.len())
        .map(|k| Layer {
            name: format!("layer {k}"),
            id: String::new(),
            parameter_bytes: if free[k] { 0.0 } else { 3.0 },
            measured: vec![Measurement {
                forward_s: if free[k] { 0.0 } else { f64::from(1 << k) },
                activation_bytes: f64::from(bytes[k]),
                ..Measurement::default()
            }],
            ..Layer::default()
        })
        .collect();
    Graph { batch_sizes: vec![4], layers, edges: edges.to_vec(), tied_weights: vec![] }
}

prop_compose! {
    fn any_graph(free_share: f64)(count in 1..8_usize)(
        free in prop::collection::vec(prop::bool::weighted(free_share), count),
        bytes in prop::collection::vec(0..5_u32, count),
        joined in prop::collection::vec(prop::bool::weighted(0.35), count * count),
        shuffled in Just((0..count).collect::<Vec<_>>()).prop_shuffle(),
    ) -> Graph {
        let count = free.len();
        let pairs = (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b)));
        let edges: Vec<_> =
            pairs.filter(|&(a, b)| joined[a * count + b]).map(|(a, b)| (shuffled[a], shuffled[b])).collect();
        graph(&free, &bytes, &edges)
    }
}

/// Every down-set as a bit mask over layers.
fn down_sets(graph: &Graph) -> Vec<u32> {
    (0..1_u32 << graph.layers.len())
        .filter(|set| graph.edges.iter().all(|&(from, to)| set >> to & 1 == 0 || set >> from & 1 == 1))
        .collect()
}

fn boundary_bytes(graph: &Graph, set: u32) -> f64 {
    let crosses = |layer: usize| graph.edges.iter().any(|&(from, to)| from == layer && set >> to & 1 == 0);
    let inside = (0..graph.layers.len()).filter(|&layer| set >> layer & 1 == 1);
    inside.filter(|&layer| crosses(layer)).map(|layer| graph.layers[layer].measured[0].activation_bytes).sum()
}

fn seconds(graph: &Graph, set: u32) -> f64 {
    (0..graph.layers.len()).filter(|&k| set >> k & 1 == 1).map(|k| graph.layers[k].measured[0].forward_s).sum()
}

fn mask(states: &CutPoints, state: usize) -> u32 {
    states.layers_between(0, state).iter().map(|&layer| 1_u32 << layer).sum()
}

fn masks(states: &CutPoints) -> Vec<u32> {
    (0..states.len()).map(|state| mask(states, state)).collect()
}

/// Smallest sum of boundaries over all ways to add costly layers one by one.
fn best_sum_of_boundaries(graph: &Graph, sets: &[u32], from: u32) -> f64 {
    let full = (1 << graph.layers.len()) - 1;
    if from == full {
        return 0.0;
    }
    sets.iter()
        .filter(|&&set| set & from == from && (set ^ from).is_power_of_two())
        .map(|&set| boundary_bytes(graph, set) + best_sum_of_boundaries(graph, sets, set))
        .fold(f64::INFINITY, f64::min)
}

proptest! {
    #[test]
    fn states_are_exactly_the_down_sets_of_layers_that_cost_something(graph in any_graph(0.0)) {
        let states = CutPoints::of(&graph, DEFAULT_BOUND).unwrap();
        let mut found = masks(&states);
        found.sort_unstable();
        prop_assert_eq!(found, down_sets(&graph));
        prop_assert_eq!(states.cuts(), &Cuts::Exact);
    }

    #[test]
    fn sums_and_boundaries_are_those_of_the_layers_inside(graph in any_graph(0.4)) {
        let states = CutPoints::of(&graph, DEFAULT_BOUND).unwrap();
        for (state, set) in masks(&states).into_iter().enumerate() {
            let totals = states.totals(state, 0);
            prop_assert_eq!(totals.boundary_bytes, boundary_bytes(&graph, set));
            prop_assert_eq!(totals.forward_s, seconds(&graph, set));
        }
    }

    #[test]
    fn a_state_comes_after_its_subsets_from_empty_to_full(graph in any_graph(0.4)) {
        let states = CutPoints::of(&graph, DEFAULT_BOUND).unwrap();
        let sets = masks(&states);
        prop_assert_eq!(sets[0], 0);
        prop_assert_eq!(sets[sets.len() - 1], (1 << graph.layers.len()) - 1);
        for i in 0..sets.len() {
            for j in 0..sets.len() {
                prop_assert_eq!(states.is_subset(i, j), sets[i] & !sets[j] == 0);
                prop_assert!(i <= j || !states.is_subset(i, j));
            }
        }
    }

    #[test]
    fn joining_free_layers_makes_no_pair_of_cuts_dearer(graph in any_graph(0.6)) {
        let states = CutPoints::of(&graph, DEFAULT_BOUND).unwrap();
        let kept = masks(&states);
        let all = down_sets(&graph);
        let as_good = |set: u32| -> Vec<u32> {
            let no_dearer = |&other: &u32| boundary_bytes(&graph, other) <= boundary_bytes(&graph, set);
            kept.iter().copied().filter(|&other| seconds(&graph, other) == seconds(&graph, set)).filter(no_dearer).collect()
        };
        let substitutes: Vec<Vec<u32>> = all.iter().map(|&set| as_good(set)).collect();
        for (inner, instead_inner) in all.iter().zip(&substitutes) {
            for (outer, instead_outer) in all.iter().zip(&substitutes).filter(|(outer, _)| inner & !**outer == 0) {
                let nested = instead_inner.iter().any(|i| instead_outer.iter().any(|j| i & !j == 0));
                prop_assert!(nested, "{inner:b} in {outer:b}");
            }
        }
    }

    #[test]
    fn the_best_order_has_the_smallest_sum_of_boundaries(graph in any_graph(0.0)) {
        let states = CutPoints::of(&graph, DEFAULT_BOUND).unwrap().linear();
        let sum: f64 = (0..states.len()).map(|state| states.totals(state, 0).boundary_bytes).sum();
        prop_assert!(states.is_linear());
        prop_assert_eq!(states.len(), graph.layers.len() + 1);
        prop_assert_eq!(sum, best_sum_of_boundaries(&graph, &down_sets(&graph), 0));
    }

    #[test]
    fn beyond_the_bound_one_order_is_left_and_says_why(graph in any_graph(0.3)) {
        let exact = CutPoints::of(&graph, DEFAULT_BOUND).unwrap();
        prop_assume!(!exact.is_linear());
        let states = CutPoints::of(&graph, exact.len() - 1).unwrap();
        let Cuts::LinearOrder { why } = states.cuts() else { panic!("{:?}", states.cuts()) };
        let bound_named = format!("more than {} cut points", exact.len() - 1);
        prop_assert!(why.contains(&bound_named), "{}", why);
        prop_assert!(states.is_linear());
        let all = masks(&exact);
        prop_assert!(masks(&states).iter().all(|set| all.contains(set)));
        // On graphs this small the beam keeps every order, so it finds the best one, too.
        let sum = |states: &CutPoints| (0..states.len()).map(|state| states.totals(state, 0).boundary_bytes).sum::<f64>();
        prop_assert_eq!(sum(&states), sum(&exact.linear()));
    }
}

#[test]
fn a_ladder_of_branches_stays_bounded() {
    // Forty blocks of two parallel branches with ten layers each: 121 cuts a block.
    let (blocks, length) = (40, 10);
    let mut edges = Vec::new();
    let mut last = 0;
    for block in 0..blocks {
        let first = 1 + block * (2 * length + 1);
        let join = first + 2 * length;
        for branch in [first, first + length] {
            edges.push((last, branch));
            edges.extend((branch..branch + length - 1).map(|layer| (layer, layer + 1)));
            edges.push((branch + length - 1, join));
        }
        last = join;
    }
    let layer = Layer {
        name: "layer".into(),
        id: String::new(),
        parameter_bytes: 1.0,
        measured: vec![Measurement { activation_bytes: 1.0, ..Measurement::default() }],
        ..Layer::default()
    };
    let graph = Graph { batch_sizes: vec![1], layers: vec![layer; last + 1], edges, tied_weights: vec![] };
    let exact = CutPoints::of(&graph, DEFAULT_BOUND).unwrap();
    assert_eq!(exact.cuts(), &Cuts::Exact);
    assert_eq!(exact.len(), 2 + blocks * 121);
    let states = CutPoints::of(&graph, 100).unwrap();
    assert_eq!(states.len(), last + 2);
    assert_eq!(states.layers_between(0, states.len() - 1).len(), last + 1);
}

#[test]
fn a_mask_that_every_layer_reads_adds_no_cuts() {
    let free = [true, false, false, false];
    let states = CutPoints::of(&graph(&free, &[1, 1, 1, 1], &[(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)]), 100).unwrap();
    assert_eq!(masks(&states), [0b0000, 0b0011, 0b0111, 0b1111]);
}

#[test]
fn unusable_numbers_are_named() {
    let message = |graph: &Graph| match CutPoints::of(graph, 10) {
        Err(Error::Profile { message, .. }) => message,
        other => panic!("{other:?}"),
    };
    let mut broken = graph(&[false, false], &[1, 1], &[(0, 1)]);
    broken.layers[1].measured[0].backward_s = f64::NAN;
    assert_eq!(message(&broken), "layer `layer 1` has NaN backward seconds");
    assert_eq!(message(&Graph { batch_sizes: vec![1], ..Graph::default() }), "the profile has no layers");
    assert!(message(&graph(&[false, false], &[1, 1], &[(0, 1), (1, 0)])).contains("cycle"));
    assert!(message(&Graph { batch_sizes: vec![], ..broken.clone() }).contains("batch sizes are []"));
}
