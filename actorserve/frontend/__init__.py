# SPDX-License-Identifier: Apache-2.0
"""Network front ends; each is handed a door to the server and knows no actor."""
