//! Bounds on the plans of all cuts of a model, computed from sums over its layers alone.

use super::problem::{Chain, HostType, Objective};

/// Returns a lower bound on the value of every plan, with any cuts. Numbers of hosts and of bits are whole.
///
/// - Throughput: the slowest layer on its best host, or the work of all layers over all hosts (see [`work_s`]).
/// - Latency: the sum of all layers, each on the host that is fastest at it.
/// - Hosts: the number that can do the work within `limit_s`, or hold the layers in memory.
pub(super) fn bound(chain: &Chain, objective: Objective, limit_s: f64) -> f64 {
    match objective {
        Objective::Throughput => slowest_layer(chain).1.max(work_s(chain)),
        Objective::Latency => (0..chain.layer_bytes.len()).map(|layer| min_s(chain, layer, 1)).sum(),
        Objective::Hosts => {
            let mut speeds = weights(chain);
            speeds.sort_by(|one, other| other.0.total_cmp(&one.0));
            let by_work = fewest(speeds.iter().map(|(weight, hosts)| (weight * limit_s, *hosts)), weighted_s(chain));
            let types = chain.types.iter().filter(|host| host.hosts > 0);
            let mut memory: Vec<(f64, usize)> = types.map(|host| (host.memory_bytes, host.hosts)).collect();
            memory.sort_by(|one, other| other.0.total_cmp(&one.0));
            by_work.max(fewest(memory.into_iter(), chain.layer_bytes.iter().sum())).max(1.0)
        }
        Objective::Bits => 0.0,
    }
}

/// Returns the layer that takes longest on its best hosts, counted from 0, and its interval there in seconds.
pub(super) fn slowest_layer(chain: &Chain) -> (usize, f64) {
    let intervals = (0..chain.layer_bytes.len()).map(|layer| min_s(chain, layer, chain.max_replicas));
    intervals.enumerate().fold((0, 0.0), |slowest, next| if next.1 > slowest.1 { next } else { slowest })
}

/// Returns the shortest interval of a layer on at most `replicas` hosts of one type that may run it.
fn min_s(chain: &Chain, layer: usize, replicas: usize) -> f64 {
    let types = chain.types.iter().filter(|host| host.hosts > 0 && may_run(chain, host, layer));
    types.map(|host| host.time_s[layer] / host.hosts.min(replicas) as f64).fold(f64::INFINITY, f64::min)
}

/// Returns whether a host may run a layer, as far as that is known for all cuts.
// With the model's other cuts, a host may run a layer that is joined to a forbidden one here. So the bound must
// ignore pins and exclusions then.
pub(super) fn may_run(chain: &Chain, host: &HostType, layer: usize) -> bool {
    chain.is_restricted || host.may_run.is_empty() || host.may_run[layer]
}

/// Returns the interval that the hosts need at least, even if each could take any part of any layer, in seconds.
///
/// Let `w` be weights of the hosts that add up to 1. Then `T = Σ w T ≥ Σ w · (time of the host's layers)`, and each
/// layer adds at least its smallest `w · time` over all hosts. If hosts differ by a constant factor, weights in
/// proportion to speed are best.
pub(super) fn work_s(chain: &Chain) -> f64 {
    let total: f64 = weights(chain).iter().map(|&(weight, hosts)| weight * hosts as f64).sum();
    if total > 0.0 { weighted_s(chain) / total } else { 0.0 }
}

/// Returns the weight and number of the hosts of each type. The weight is the inverse of the time that one takes for
/// all layers.
fn weights(chain: &Chain) -> Vec<(f64, usize)> {
    // The minimum avoids a division by zero for hosts on which all layers take no time.
    let weight = |time_s: &[f64]| 1.0 / time_s.iter().sum::<f64>().max(1e-300);
    chain.types.iter().filter(|host| host.hosts > 0).map(|host| (weight(&host.time_s), host.hosts)).collect()
}

/// Returns the sum over the layers of the smallest weighted time on any host that may run the layer.
fn weighted_s(chain: &Chain) -> f64 {
    let weights = weights(chain);
    let used: Vec<&HostType> = chain.types.iter().filter(|host| host.hosts > 0).collect();
    let min = |layer: usize| {
        let types = used.iter().zip(&weights).filter(|(host, _)| may_run(chain, host, layer));
        types.map(|(host, (weight, _))| weight * host.time_s[layer]).fold(f64::INFINITY, f64::min)
    };
    (0..chain.layer_bytes.len()).map(min).sum()
}

/// Returns how many items of these sizes, largest first, add up to `needed`, or one more than all if they do not.
fn fewest(sizes: impl Iterator<Item = (f64, usize)>, needed: f64) -> f64 {
    // The margin covers rounding: a bound must not count one more item because of the last digit.
    let (mut taken, mut left) = (0.0, needed * (1.0 - 1e-9));
    for (size, hosts) in sizes.map(|(size, hosts)| (size, hosts as f64)) {
        if left <= size * hosts {
            return taken + (left / size).ceil().max(0.0);
        }
        (taken, left) = (taken + hosts, left - size * hosts);
    }
    taken + f64::from(left > 0.0)
}
