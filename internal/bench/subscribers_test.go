// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestSubscribersRefuses(t *testing.T) {
	good := SubscribersOptions{Routers: []Router{&bareRouter{name: "bare"}}, Sessions: 100, Block: 512, Hosts: 118, Duration: time.Second, Trials: 1}
	if err := good.check(); err != nil {
		t.Error(err)
	}
	for option, change := range map[string]func(*SubscribersOptions){
		"Routers":  func(o *SubscribersOptions) { o.Routers = nil },
		"Trials":   func(o *SubscribersOptions) { o.Trials = 0 },
		"Sessions": func(o *SubscribersOptions) { o.Sessions = 0 },
		"Duration": func(o *SubscribersOptions) { o.Duration = 0 },
		"Block":    func(o *SubscribersOptions) { o.Block = 500 },
		"Hosts":    func(o *SubscribersOptions) { o.Hosts = 119 },
	} {
		o := good
		change(&o)
		var refused *OptionError
		if _, err := MeasureSubscribers(t.Context(), o); !errors.As(err, &refused) || strings.Join(refused.Fields, ", ") != option {
			t.Errorf("%s: %v", option, err)
		}
	}
}

// A comparison is of rounds, not of medians.
func TestCompareWithFirst(t *testing.T) {
	p := Params{Flows: 7}
	res := &Result{Routers: []RouterUse{{Name: "a"}, {Name: "b"}}, Figures: []Figure{
		NewFigure("a", "x_pps", p, 10, 20, 40), NewFigure("b", "x_pps", p, 5, 30, 20), NewFigure("b", "x_pps", Params{Flows: 8}, 1),
	}}
	res.Figures[0].Label = "noisy"
	compareWithFirst(res, "x_pps", "x_ratio")
	if f := figuresOf(res, "b", "x_ratio"); len(f) != 1 || f[0].Median != 0.5 || f[0].Max != 1.5 || f[0].Label != "noisy" {
		t.Errorf("%+v", f)
	}
}
