//! The simulator against closed forms and laws.

use hpgo::schedule::{Action, Kind, Schedule};
use hpgo::simulate::{Costs, Links, StageTimes, Sweep};

fn action(kind: Kind, stage: u32, micro_batch: u32) -> Action {
    Action { kind, stage, micro_batch, backward: (stage, micro_batch) }
}

/// 1F1B with `window(stage)` forwards before the first backward.
fn one_f_one_b(stages: u32, micro_batches: u32, window: impl Fn(u32) -> u32) -> Schedule {
    let orders = (0..stages)
        .map(|stage| {
            let warm_up = window(stage).min(micro_batches);
            let mut order: Vec<Action> = (0..warm_up).map(|m| action(Kind::Forward, stage, m)).collect();
            for m in 0..micro_batches {
                order.push(action(Kind::Backward, stage, m));
                if m + warm_up < micro_batches {
                    order.push(action(Kind::Forward, stage, m + warm_up));
                }
            }
            order
        })
        .collect();
    Schedule {
        name: "1f1b".into(),
        chain_length: stages,
        micro_batches: std::iter::once(0..micro_batches).collect(),
        rank_of_stage: (0..stages).collect(),
        orders,
    }
}

#[test]
fn one_f_one_b_takes_its_closed_form() {
    let mut sweep = Sweep::default();
    for (stages, micro_batches) in [(1, 1), (4, 8), (8, 3), (8, 64)] {
        let schedule = one_f_one_b(stages, micro_batches, |stage| stages - stage);
        let costs = Costs::of_stages(vec![StageTimes::new(1.0, 2.0); stages as usize]);
        let step_s = sweep.step_s(&schedule, &costs, Links::Queued).expect("valid");
        assert!((step_s - f64::from(micro_batches + stages - 1) * 3.0).abs() < 1e-9);
    }
}
