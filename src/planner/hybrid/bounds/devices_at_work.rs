//! Lemma *Devices at work* (docs/proofs.md#devices-at-work): no step is shorter than all work divided by all speed.
//!
//! A layer on *r* devices of speed *v* keeps the speed *r v* busy for *t(r)* / *v* seconds per micro-batch. So *M* Σ
//! min *r t(r)*, summed over all layers, is at most the step multiplied by the speed of all useful devices. Divided by
//! this speed, it is a bound.

use crate::cost::Totals;
use crate::planner::hybrid::subproblem::Subproblem;

/// Returns the smallest device time of each layer for one micro-batch: its time multiplied by its replicas, at speed 1.
pub(crate) fn min_work_s(task: &Subproblem<'_>) -> Vec<f64> {
    let forwards = task.recompute.min_forwards();
    let replica_counts: Vec<(f64, &Totals)> = (task.totals_index.iter().zip(0_u32..))
        .filter_map(|(totals_index, replicas)| {
            totals_index.map(|totals_index| (f64::from(replicas), &task.totals[totals_index as usize]))
        })
        .collect();
    (0..task.model.layer_parameter_bytes.len())
        .map(|layer| {
            (replica_counts.iter())
                .map(|(replicas, t)| replicas * (forwards * t.layer_forward_s[layer] + t.layer_backward_s[layer]))
                .fold(f64::INFINITY, f64::min)
        })
        .collect()
}

/// Returns a lower bound on the step in seconds: the fastest devices that a plan can use work all the time.
pub(crate) fn busy_s(task: &Subproblem<'_>) -> f64 {
    let mut nodes: Vec<(f64, u32)> = task.cluster.nodes.iter().map(|m| (m.speed, m.devices)).collect();
    nodes.sort_by(|a, b| b.0.total_cmp(&a.0));
    // A plan uses at most `max_devices` devices: each stage has a layer, and no more replicas than a share allows. The
    // fastest ones give the lowest bound.
    let (mut speed, mut devices) = (0.0, task.max_devices());
    for (speed_each, of_node) in nodes {
        let used = devices.min(of_node);
        speed += f64::from(used) * speed_each;
        devices -= used;
    }
    f64::from(task.micro_batches) * min_work_s(task).iter().sum::<f64>() / speed
}
