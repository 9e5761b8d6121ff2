// SPDX-License-Identifier: Apache-2.0

package probe

import "strconv"

// Container says what processes of this machine are part of: "docker web1",
// "pod shop/cart-5d8f", "" when none tells.
func Container(pids []int) string {
	words := make([]string, len(pids))
	for i, pid := range pids {
		words[i] = strconv.Itoa(pid)
	}
	return containerOf(newView(""), words)
}
