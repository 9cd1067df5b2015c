//! Lists of devices for patterns: nodes in some order, divided into blocks of some widths.

use crate::cost::network::Cluster;
use crate::planner::effort::placement;
use rustc_hash::FxHashSet;

/// Returns lists that give the node of each device, for each order of nodes and each division into blocks. Of lists
/// that differ only in the numbers of equal nodes, the first one is returned.
pub(super) fn listings(cluster: &Cluster) -> Vec<Vec<u32>> {
    let nodes = &cluster.nodes;
    let (classes, class_of) = cluster.classes();
    let given: Vec<u32> = (0..nodes.len() as u32).collect();
    // Many orders are tried, because the best one depends on the cluster: fast nodes may belong to the first stages or
    // to the last ones.
    let mut orders = vec![given.clone(), given.iter().rev().copied().collect()];
    let by = |value: &dyn Fn(u32) -> f64| -> Vec<u32> {
        let mut order = given.clone();
        order.sort_by(|&a, &b| value(a).total_cmp(&value(b)));
        order
    };
    let mut shortened = vec![given.clone()];
    for sign in [-1.0, 1.0] {
        let by_speed = by(&|node| sign * nodes[node as usize].speed);
        let by_memory = by(&|node| sign * nodes[node as usize].memory_bytes);
        if sign < 0.0 {
            shortened.extend([by_speed.clone(), by_memory.clone()]);
        }
        orders.extend([by_speed, by_memory]);
    }
    // Stages run at the speed of their slowest device, so nodes of one class alone may be better than all nodes.
    if classes.len() > 1 {
        for class in 0..classes.len() {
            let alone: Vec<u32> = given.iter().copied().filter(|&node| class_of[node as usize] == class).collect();
            shortened.push(alone.clone());
            orders.push(alone);
        }
    }
    // A shorter list leaves nodes idle. That helps if the model has too few layers or the batch too few samples.
    for order in shortened {
        let lengths = std::iter::successors(Some(1), |length| Some(length * 2));
        let is_long = |length: usize| order.len() <= placement::MANY_NODES || 4 * length >= order.len();
        let lengths = lengths.take_while(|&length| length < order.len()).filter(|&length| is_long(length));
        orders.extend(lengths.map(|length| order[..length].to_vec()));
    }
    let mut known: FxHashSet<Vec<(usize, u32)>> = FxHashSet::default();
    let mut listings = Vec::new();
    for order in orders {
        // Nodes of one class are interchangeable, so equivalent lists give plans of equal cost, and one of them
        // suffices. Numbering the nodes of each class in order of appearance makes such lists equal.
        let all = order.len();
        for blocks in chops(all) {
            let listing = listed(cluster, &order, &blocks);
            let mut names: Vec<Option<u32>> = vec![None; nodes.len()];
            let mut named = vec![0; classes.len()];
            let renamed = (listing.iter())
                .map(|&node| {
                    let class = class_of[node as usize];
                    let name = names[node as usize].get_or_insert_with(|| {
                        named[class] += 1;
                        named[class]
                    });
                    (class, *name)
                })
                .collect();
            if known.insert(renamed) {
                listings.push(listing);
            }
        }
    }
    listings
}

/// Returns the block widths that `all` nodes are divided into: equal blocks, or blocks that become wider.
pub(super) fn chops(all: usize) -> Vec<Vec<usize>> {
    let doubling = |first: usize| std::iter::successors(Some(first), |width| Some(width * 2));
    let equal = doubling(1)
        .take_while(|&width| width < all)
        .filter(|&width| all <= placement::MANY_NODES || width == 1 || width == 8);
    let mut chops: Vec<Vec<usize>> = equal.chain([all]).map(|width| vec![width; all.div_ceil(width)]).collect();
    // The first layers often send most, so the first stages may need narrow blocks and later stages wide ones.
    let mut left = all;
    let mut widening = Vec::new();
    for width in doubling(1) {
        if left < 2 * width {
            break;
        }
        widening.push(width);
        left -= width;
    }
    widening.push(left);
    if all > 2 {
        chops.extend([vec![1, all - 1], widening]);
    }
    chops
}

/// Returns the node of each device of a list. Blocks of nodes follow one another, and inside a block the nodes
/// alternate.
pub(super) fn listed(cluster: &Cluster, order: &[u32], blocks: &[usize]) -> Vec<u32> {
    let mut listing = Vec::new();
    let mut order = order;
    for &width in blocks {
        let (block, rest) = order.split_at(width.min(order.len()));
        order = rest;
        let devices = |node: u32| cluster.nodes[node as usize].devices;
        let max = block.iter().map(|&node| devices(node)).max().unwrap_or(0);
        for turn in 0..max {
            listing.extend(block.iter().copied().filter(|&node| turn < devices(node)));
        }
    }
    listing
}
