//! The simulator against closed forms and laws.

use hpgo::schedule::{Request, build};
use hpgo::simulate::{Costs, Links, StageTimes, Sweep};

#[test]
fn one_f_one_b_takes_its_closed_form() {
    let mut sweep = Sweep::default();
    for (stages, micro_batches) in [(1, 1), (4, 8), (8, 3), (8, 64)] {
        let schedule = build("1f1b", &Request::new(stages, micro_batches)).expect("known");
        let costs = Costs::of_stages(vec![StageTimes::new(1.0, 2.0); stages as usize]);
        let step_s = sweep.step_s(&schedule, &costs, Links::Queued).expect("valid");
        assert!((step_s - f64::from(micro_batches + stages - 1) * 3.0).abs() < 1e-9);
    }
}
